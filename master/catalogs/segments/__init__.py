"""Segments of block records in a catalog: a columnar log for each shard, merged in the background."""
