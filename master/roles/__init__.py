"""What a master is at a time: the owner of the catalog, or one that follows it."""
