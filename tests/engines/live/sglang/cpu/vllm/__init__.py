"""What SGLang falls back to on a CPU without AMX: one function of vLLM."""
