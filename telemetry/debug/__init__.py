"""What a daemon is doing right now, by the stacks of its threads: all of them once, or a sample over seconds."""
