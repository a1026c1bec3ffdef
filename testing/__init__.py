"""Conformance suites for authors of tiers, policies and transports."""
