"""Live scheduler: reports of inference instances, and dispatch of requests."""
