"""vLLM: a KV connector and a secondary tier of its offloading."""
