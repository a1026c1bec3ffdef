"""What the commands stand on and a terminal does not need: embedded clusters, replays, recordings, benchmarks, plans."""
