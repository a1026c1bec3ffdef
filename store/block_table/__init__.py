"""Table of the blocks of a node: rows, slots, leases, limits, eviction."""
