"""Benchmarks: `make bench` and its kin. Each prints a table and writes benchmarks/out/NAME.json."""
