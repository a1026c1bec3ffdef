"""Transfers within a host, by mapping the peer's shared memory."""
