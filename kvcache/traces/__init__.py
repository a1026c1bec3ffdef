"""Prompts as chains of blocks: from trace files, recordings of a cluster, or a generator."""
