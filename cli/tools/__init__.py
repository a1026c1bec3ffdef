"""Parts of the commands: local clusters, checks of `doctor`, benchmarks, replay, tables."""
