"""Registered nodes, their load and their reported reads."""
