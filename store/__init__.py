"""Storage node: block table over the tiers, tier mover, replication of events to the master, and `kvstore-node`."""
