"""Stand-in for vLLM: the one function to which SGLang falls back on a CPU without AMX."""
