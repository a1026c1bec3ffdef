"""Transfers of a request's bytes, common to both sides: parts, operations, staging, memory access and its end."""
