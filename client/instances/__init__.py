"""What an inference engine tells the scheduler and asks of it."""
