"""Placement of blocks and replicas: copies, drains, hot blocks."""
