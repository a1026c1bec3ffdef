"""Frames of clients and nodes, served by the owner of a partition."""
