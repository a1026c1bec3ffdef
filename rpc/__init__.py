"""Transport of frames: the reactor and sessions of daemons, the channels and connection pools of clients."""
