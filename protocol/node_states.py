"""States of a storage node in its master and in the control plane."""

from typing import Final

SYNCING, ALIVE = "syncing", "alive"
DEAD, STOPPED = "dead", "stopped"
"""Stopped: the process shut down in order (SIGTERM). Dead: its connection broke, or its heartbeats stopped."""
NOT_RUNNING: Final = (DEAD, STOPPED)
SUSPENDED: Final = "suspended"
"""Begins the health of a tier whose device refused a write; the reason follows. The node tries again."""
