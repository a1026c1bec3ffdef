"""Where each element of a KV cache lies on each rank, and what must be copied where between two layouts."""
