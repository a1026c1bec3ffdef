"""Tickets: proofs of identity for one node, for clients in place of a token, and for other nodes (passes). Sans-I/O."""
