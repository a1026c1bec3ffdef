"""Replicas and events that a node exchanges with other nodes and masters."""
