"""Benchmarks with real engines: a module a kind of rows, and `python -m benchmarks.engines` for all of them."""
