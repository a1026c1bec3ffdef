"""How long prefill, a decode step and a transfer will take: the interfaces, and estimators by analysis and by measurement."""
