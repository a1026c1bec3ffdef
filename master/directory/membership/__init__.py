"""Registered nodes, their load and the reads that they report."""
