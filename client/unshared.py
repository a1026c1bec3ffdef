"""Nodes of this host that a client does not reach through shared memory, and why: each reason is logged once, for whoever runs the client
would else see nothing but that it is slow.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from kvstore.rpc.address import ELSEWHERE

WhyNotHere = Callable[[str, str], str]
"""rpc.address.why_not_here."""
MAX_TOLD: Final = 4096
"""Reasons that are kept in mind as logged; beyond that nothing is logged."""
log = logging.getLogger("kvstore.client")


class Unshared:
    """Thread-safe."""

    def __init__(self, why_not_here: WhyNotHere) -> None:
        self._why_not_here = why_not_here
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}
        self._told: set[tuple[str, str]] = set()

    def note(self, node: str, reason: str) -> None:
        """It is so from now on."""
        with self._lock:
            self._reasons[node] = reason
            is_news = (node, reason) not in self._told and len(self._told) < MAX_TOLD
            if is_news:
                self._told.add((node, reason))
        if is_news:
            log.warning("node %r of this host is not reached through shared memory: %s", node, reason)

    def refused(self, node: str, unix: str, host_id: str) -> None:
        """The node named with this socket is not here: nothing to tell of one on another host."""
        reason = self._why_not_here(unix, host_id)
        if reason and reason != ELSEWHERE:
            self.note(node, reason)

    def shared(self, node: str) -> None:
        """It is reached now."""
        with self._lock:
            self._reasons.pop(node, None)

    def keep(self, nodes: Iterable[str]) -> None:
        """There are no other nodes any more."""
        kept = set(nodes)
        with self._lock:
            self._reasons = {node: reason for node, reason in self._reasons.items() if node in kept}

    def reasons(self) -> dict[str, str]:
        """By node."""
        with self._lock:
            return dict(self._reasons)
