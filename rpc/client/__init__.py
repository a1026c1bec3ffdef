"""Client side of the frame protocol: channels, connection pools, search for owners."""
