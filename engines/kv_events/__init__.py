"""KV events of engines: their messages, a subscriber to them, and keys of the blocks that they name."""
