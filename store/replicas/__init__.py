"""Blocks fetched from another node by order of the master."""
