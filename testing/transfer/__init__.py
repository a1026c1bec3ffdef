"""Conformance suite for transports."""
