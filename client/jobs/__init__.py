"""Lookups, loads and stores in the background, behind a circuit breaker that turns an unreachable store into misses."""
