"""Events to masters, inventories, and replicas fetched from other nodes."""
