"""Limits of tenants at the master: quotas and pins."""
