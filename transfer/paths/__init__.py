"""Which path carries which slice, by load, measured rate and distance, and what becomes of it when a rail or a peer fails."""
