"""The catalog `memory:`: it keeps nothing, since nobody could read it back. For tests, demos and clusters whose blocks may be forgotten.

A master that restarts learns from its nodes' inventories what they still hold; pins and the numbers of nodes are forgotten.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from kvstore.master.catalogs.group_commit import check_ops
from kvstore.master.catalogs.interface import IDENTITY_BYTES, Catalog, Done, Op
from kvstore.protocol.errors import Closed


class MemoryCatalog(Catalog):
    """See Catalog. Calls `done` before `commit` returns. One thread at a time may call it."""

    scheme: ClassVar[str] = "memory"

    def __init__(self, *, wall_clock_ns: Callable[[], int] = time.time_ns) -> None:
        """`wall_clock_ns` becomes the epoch, for operators to tell masters apart by. Nodes do so by the identity: nothing of an earlier
        owner is kept, so each has a catalog of its own, and a clock set back between two of them harms nobody.
        """
        self._wall_clock_ns = wall_clock_ns
        self._identity = secrets.token_hex(IDENTITY_BYTES)
        self._closed = False

    def open(self, *, deadline_s: float) -> int:
        return self._wall_clock_ns()

    @property
    def identity(self) -> str:
        return self._identity

    def load(self) -> Iterator[tuple[bytes, bytes]]:
        """Nothing: at `open` the map is always empty."""
        return iter(())

    def commit(self, ops: Sequence[Op], done: Done) -> None:
        check_ops(ops)
        done(Closed("the catalog is closed") if self._closed else None)

    @property
    def health(self) -> str:
        return "ok"

    def close(self) -> None:
        self._closed = True
