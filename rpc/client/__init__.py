"""Client side of the frame protocol: channels, connection pools, owner search."""
