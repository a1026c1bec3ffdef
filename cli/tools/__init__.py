"""Parts of commands: embedded clusters, checks of `doctor`, benchmarks, replay, tables."""
