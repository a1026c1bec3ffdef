"""A process beside an engine: it tells kvstore's scheduler how busy the engine is, and what the engine has in memory of its own."""
