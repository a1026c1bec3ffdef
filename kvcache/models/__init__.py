"""Shapes of language models, by name or configuration, and the sizes of their caches."""
