"""LMCache: an L2 adapter and a remote connector."""
