"""Calls that an engine does not wait for: lookups, loads and stores as jobs, behind a breaker that makes an unreachable store a miss."""
