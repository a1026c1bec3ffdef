"""Prompts as chains of blocks: read from traces, out of recordings, or generated."""
