"""Benchmarks of masters: memory, processor time and pauses, one subject a file."""
