"""Puts at a node: through shared memory, the transfer engine or sockets, and their commit requests."""
