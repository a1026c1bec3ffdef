"""What daemons write to standard error: a line an event, as text or JSON, down to a level that may be changed while they run."""
