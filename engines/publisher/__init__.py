"""KV events of the store's blocks, in the form of engines' own events, for other routers and indexes."""
