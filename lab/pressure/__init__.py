"""Model of an engine whose KV cache is too small for its users, under several strategies."""
