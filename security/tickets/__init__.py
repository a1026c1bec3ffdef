"""Tickets: what a tenant shows a node in place of his token, and a node another node. Sans-I/O."""
