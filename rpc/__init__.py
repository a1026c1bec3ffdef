"""How daemons and clients talk: the reactor and frame sessions of daemons, the channels and pools of clients. It knows no block."""
