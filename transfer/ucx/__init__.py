"""Transport `ucx`: a Connection over UCX."""
