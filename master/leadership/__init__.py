"""Ownership of partitions: election, take-over, following, and what an owner runs."""
