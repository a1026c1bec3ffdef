"""Changes of the index: reservations, block events, removals."""
