"""KV events of engines: messages, a subscriber, and keys of the blocks in them."""
