"""Discrete-event simulator of a cluster of inference engines."""
