"""A cluster of prefill and decode instances under a trace, event by event."""
