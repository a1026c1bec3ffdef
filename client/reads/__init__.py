"""Reads of values: location lookup, one read request per node, and the three ways in which values arrive."""
