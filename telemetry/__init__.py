"""What a daemon tells of itself: its HTTP port, metrics, logs and traces. It knows no block, and no daemon."""
