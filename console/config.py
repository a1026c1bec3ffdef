"""Settings of the console, for masters and for `kvstore console`."""

from dataclasses import dataclass
from typing import Final

HISTORY_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """Poll intervals and sizes of what the console keeps, in memory only: about 10 MB for a thousand nodes."""

    interval_s: float = 1.0
    """Between polls of the cluster: short enough for a live page, long enough for meaningful rates."""
    history_s: float = HISTORY_S
    node_interval_s: float = 10.0
    """Between samples of each node."""
    max_nodes: int = 2048
    """Most nodes with a history."""
    max_events: int = 1000
    contents_ttl_s: float = 5.0
    """Time for which the directory's contents are cached. They are requested only for a page that shows them."""
    masters_ttl_s: float = 5.0
    """As `contents_ttl_s`, for the masters' reports."""
    topologies_ttl_s: float = 2.0
    """As `contents_ttl_s`, for the nodes' topologies and the counters of their NICs."""
