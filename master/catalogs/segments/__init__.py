"""Blocks of the catalog in segments: a log of columns a shard, rewritten in the background."""
