"""Directory of which nodes hold which block: rows, holders, members, reservations, removals, replicas. Sans-I/O."""
