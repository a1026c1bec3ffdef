"""Client side of the scheduler: reports of inference engines, and placement of requests."""
