"""Effects of operations, buffers, arguments, forks: what all operations of a client stand on."""
