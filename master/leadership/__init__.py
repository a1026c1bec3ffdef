"""Ownership of partitions: election, failover, followers, and the parts that an owner runs."""
