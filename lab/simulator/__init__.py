"""Discrete-event simulator of a cluster of engines."""
