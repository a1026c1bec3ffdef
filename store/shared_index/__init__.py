"""Index of blocks in shared memory, which clients of the host read without a message."""
