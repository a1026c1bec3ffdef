"""Moves of blocks between the tiers of one node, in threads."""
