"""The storage node: a table of blocks over the tiers, the mover between them, the publisher to the master, and kvstore-node."""
