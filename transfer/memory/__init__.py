"""Memory of transfers: registered regions, exports to peers, mappings of other processes' memory, and copies."""
