"""Transports that send and receive (Connection), the agent that makes them one-sided, its pool of endpoints, and TCP."""
