"""Reads at a node: values mapped by the reader, sent with the answer, or fetched from lower tiers first."""
