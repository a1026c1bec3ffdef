"""Hugging Face transformers: caches for `generate` that are filled from the store, and stored again. See prefix_store.py."""
