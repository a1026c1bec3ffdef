"""Holds of a client: what its lookups found stays where it is until it was loaded.

A `Hold` is a plain value that travels in an engine's messages. What the client has asked for in its name, at which nodes, is kept in
`HoldTable`, and so only the client that took a hold can release it.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.client.arguments import check_hold
from kvstore.protocol.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstore.client.local.nodes import LocalNode

MAX_HOLDS: Final = 16_384
"""Holds of one client that are neither released nor over; a lookup in the name of another one finds without holding."""
PURGED_AT_ONCE: Final = 8
"""Of the oldest holds, so many are looked at for their end whenever one is added."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The name of a hold: a number that no other has, and how long each lookup may keep what it finds. Make one with `new_hold`, give it to
    lookups (`match_prefix(keys, hold=hold)`) and at last to `release`. It can be pickled and sent to other processes."""

    number: int
    duration_ms: int


def new_hold(hold_s: float) -> Hold:
    """A hold that has found nothing yet. Asks nobody. The node bounds its length, too (setting `max_lease_s`). Raises InvalidArgument."""
    check_hold(hold_s)
    return Hold((int.from_bytes(os.urandom(8), "little") >> 2) << 1, max(1, round(hold_s * 1000)))


def require_hold(hold: Hold | None, *, is_optional: bool = True) -> None:
    """Raises InvalidArgument unless `hold` is a Hold, or None where it is optional."""
    if not (hold is None and is_optional) and not isinstance(hold, Hold):
        raise InvalidArgument(f"hold is made by new_hold, not a {type(hold).__name__}")


@dataclass(slots=True)
class Kept:
    """Where something may be held in one hold's name."""

    until_ns: int
    local: "set[LocalNode]" = field(default_factory=set)
    """Nodes of this host, by their shared memory."""
    nodes: set[int] = field(default_factory=set)
    """Nodes that were asked by message."""


class HoldTable:
    """The holds of one client. Thread-safe; bounded by MAX_HOLDS."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    def extend(self, hold: Hold, now_ns: int) -> int | None:
        """Until when what is found now may be held. None: there are too many holds."""
        until_ns = now_ns + hold.duration_ms * 1_000_000
        with self._lock:
            kept = self._kept.get(hold.number)
            if kept is not None:
                kept.until_ns = max(kept.until_ns, until_ns)
                return until_ns
            self._purge(now_ns)
            if len(self._kept) >= MAX_HOLDS:
                return None
            self._kept[hold.number] = Kept(until_ns)
        return until_ns

    def add_local(self, hold: Hold, node: "LocalNode") -> None:
        with self._lock:
            if (kept := self._kept.get(hold.number)) is not None:
                kept.local.add(node)

    def add_nodes(self, hold: Hold, nodes: Iterable[int]) -> None:
        with self._lock:
            if (kept := self._kept.get(hold.number)) is not None:
                kept.nodes.update(nodes)

    def take(self, hold: Hold) -> Kept | None:
        """Forget a hold: where it is to be released. None: it is unknown, or was released."""
        with self._lock:
            return self._kept.pop(hold.number, None)

    def __len__(self) -> int:
        return len(self._kept)

    def _purge(self, now_ns: int) -> None:
        """Forget some that are over: each that is added takes the place of an older one that nobody released."""
        oldest = [number for number, _ in zip(self._kept, range(PURGED_AT_ONCE), strict=False)]
        for number in oldest:
            if self._kept[number].until_ns <= now_ns:
                del self._kept[number]
            else:
                self._kept.move_to_end(number)
