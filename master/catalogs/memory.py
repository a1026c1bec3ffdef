"""The catalog `memory:`: it keeps nothing, since nobody could read it back. For tests, demos and clusters whose blocks may be forgotten.

A master that restarts learns from its nodes' inventories what they still hold; pins and the numbers of nodes are forgotten.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

from kvstore.master.catalogs.group_commit import check_changes
from kvstore.master.catalogs.interface import IDENTITY_BYTES, Candidate, Catalog, Change, Done, Follower
from kvstore.protocol.errors import Closed, KVStoreError, StaleEpoch


class MemoryCatalog(Catalog):
    """See Catalog. Calls `done` before `commit` returns. One thread at a time may call it."""

    scheme: ClassVar[str] = "memory"

    def __init__(self) -> None:
        self._identity = secrets.token_hex(IDENTITY_BYTES)
        self._refusal: KVStoreError | None = StaleEpoch("this master does not own the catalog yet")

    def open(self, *, deadline_s: float) -> None:
        pass

    @property
    def identity(self) -> str:
        return self._identity

    def follow(self, me: Candidate, follower: Follower) -> None:
        """There are no records, and nobody else: the election is at once. The epoch is the wall clock's time, for operators to tell masters
        apart by. Nodes do so by the identity: nothing of an earlier owner is kept, so each has a catalog of its own, and a clock set back
        between two of them harms nobody."""
        epoch = time.time_ns()

        def elect() -> None:
            follower.begin()
            follower.owned_by(None)
            self._refusal = None
            follower.elected(epoch)

        threading.Thread(target=elect, name="catalog-follow", daemon=True).start()

    def commit(self, changes: Sequence[Change], done: Done) -> None:
        check_changes(changes)
        done(self._refusal)

    @property
    def health(self) -> str:
        return "ok"

    def close(self) -> None:
        self._refusal = Closed("the catalog is closed")
