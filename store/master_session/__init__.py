"""Connection of a node to the owner of each partition."""
