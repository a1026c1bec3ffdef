"""Metrics: the list of all metrics, the values that daemons maintain, and the Prometheus exposition."""
