"""Model of engines that share the memory of their KV cache."""
