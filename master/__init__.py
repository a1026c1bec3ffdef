"""The master: the directory of blocks, the catalogs that make it durable, placement, and the kvstore-master daemon."""
