"""Quotas of tenants, and the file that configures them."""
