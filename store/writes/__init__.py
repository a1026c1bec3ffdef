"""Puts at a node: over the socket, in shared memory, and their commit at the master."""
