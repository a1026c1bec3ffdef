"""Writes to the directory: reservations, block events, removals."""
