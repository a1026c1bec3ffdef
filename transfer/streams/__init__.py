"""Two-sided transports: the Connection interface, the agent that makes it one-sided, its endpoint pool, and TCP."""
