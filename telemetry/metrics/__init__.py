"""Metrics: one list of what there is (`catalog`), plain numbers that loops own, and the text made of both on request."""
