"""Foundations of client operations: effects, buffers, argument checks, fork detection."""
