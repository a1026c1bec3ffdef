"""Reads at a node: what is pointed at, what is sent, what waits for its turn to be fetched."""
