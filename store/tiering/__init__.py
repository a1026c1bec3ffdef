"""Moves between tiers: the mover, the drain before shutdown, and the prefault thread."""
