"""Control plane between ranks: connections, and agreement on which requests are complete."""
