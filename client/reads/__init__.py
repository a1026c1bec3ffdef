"""How values are read: where they are, one Read to each node, and what is done with what it answers."""
