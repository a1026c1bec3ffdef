"""Process beside an engine that reports its load and its own cached blocks to kvstore's scheduler."""
