"""Puts at a node: open, commit, claim, wait for room, and the answers."""
