"""Quotas: how much of a cluster each tenant may take. Sans-I/O but for the file that says it."""
