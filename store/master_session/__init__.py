"""Sessions of a node with the owner of each partition."""
