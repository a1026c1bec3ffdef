"""What the clients of this host find without asking: an index a tenant in shared memory, and the desks where clients say what they use."""
