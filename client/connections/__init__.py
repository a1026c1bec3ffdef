"""A client's state about masters and nodes: connections, mapped slabs, cached locations, reservations."""
