"""The taking side of a rank: its requests, which way their parts come, what the store had already, and where it all goes."""
