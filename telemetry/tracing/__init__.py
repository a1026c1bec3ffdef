"""OpenTelemetry traces of calls across client, node and master; imported only if configured."""
