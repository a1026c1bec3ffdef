"""Hugging Face transformers: caches for `generate`, loaded from the store and saved to it. See prefix_store.py."""
