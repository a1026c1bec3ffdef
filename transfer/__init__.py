"""How bytes move: the reactor and frame sessions of the daemons, the channels of clients."""
