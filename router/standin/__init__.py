"""A stand-in for an inference engine, which computes nothing, to try the router with."""
