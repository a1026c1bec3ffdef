"""How values are written: reserved at the master, then by message or into slots of the node that it names."""
