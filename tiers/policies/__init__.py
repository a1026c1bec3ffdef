"""Eviction policies of the tiers: the interface, its conformance suite, and the policies."""
