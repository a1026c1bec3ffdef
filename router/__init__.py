"""HTTP router in front of engines, which places each request by the master's scheduler; and fake engines to test it."""
