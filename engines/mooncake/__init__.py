"""Mooncake's Python API over the store, for programs that were written for Mooncake."""
