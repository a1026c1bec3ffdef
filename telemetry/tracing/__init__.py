"""Traces: which part of one slow call took how long, over client, node and master. OpenTelemetry, loaded where it is wanted."""
