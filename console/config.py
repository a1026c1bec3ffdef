"""The settings of a console, in one place for all that serve one."""

from dataclasses import dataclass
from typing import Final

HISTORY_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """How much a console keeps, in memory alone: about 10 MB for a thousand nodes."""

    interval_s: float = 1.0
    """Between looks at the cluster: rates of a shorter time say little, and a page looks live."""
    history_s: float = HISTORY_S
    node_interval_s: float = 10.0
    """Between samples of each node."""
    max_nodes: int = 2048
    """With a history of their own."""
    max_events: int = 1000
    contents_ttl_s: float = 5.0
    """What the directory holds is copied anew after this, and only while somebody looks at it."""
    masters_ttl_s: float = 5.0
    """What each master says of itself, as `contents_ttl_s`."""
    topologies_ttl_s: float = 2.0
    """What nodes said of their hosts, and of what their NICs carried, as `contents_ttl_s`."""
