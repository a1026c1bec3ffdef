"""Hugging Face transformers: a cache that reads and fills the store."""
