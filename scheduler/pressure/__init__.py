"""What to do when the cache is full: capacity of GPUs and tiers, and strategies of one server under load."""
