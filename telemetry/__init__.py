"""Telemetry of daemons: HTTP port, metrics, logs and traces. It depends on no block code and no daemon."""
