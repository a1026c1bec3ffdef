"""Index of blocks: rows, keys, holders, prefixes, and lookups."""
