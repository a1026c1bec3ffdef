"""Blocks of nodes on this host, found and read in shared memory without asking anybody: no effects, no round trip."""
