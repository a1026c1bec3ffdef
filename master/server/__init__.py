"""Frame handlers for clients and nodes, run by the owner of a partition."""
