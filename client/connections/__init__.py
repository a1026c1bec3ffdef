"""What a client holds at masters and nodes: connections, mapped slabs, known locations, reservations."""
