"""Moves of blocks between the tiers of a node."""
