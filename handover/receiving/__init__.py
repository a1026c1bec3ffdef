"""Receiving side of a rank: its requests, the transfer mode of their parts, and prefixes from the store."""
