"""States of a storage node, as its master has them and the control plane tells them."""

from typing import Final

SYNCING, ALIVE = "syncing", "alive"
DEAD, STOPPED = "dead", "stopped"
"""Stopped: its process ended in an orderly way (SIGTERM). Dead: its link broke, or it was silent."""
AWAY: Final = (DEAD, STOPPED)
