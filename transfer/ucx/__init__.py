"""UCX as a Connection."""
