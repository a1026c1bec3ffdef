"""The HTTP port of a daemon: health for whoever starts it, and what other parts add. Not the router's port for requests."""
