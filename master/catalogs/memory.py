"""The catalog `memory:`, which stores nothing: for tests, demos and clusters whose blocks may be lost.

A master that restarts learns the blocks from its nodes' inventories; pins and node numbers are lost."""

import secrets
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

from kvstore.master.catalogs.group_commit import check_changes
from kvstore.master.catalogs.interface import IDENTITY_BYTES, Candidate, Catalog, Change, Done, Follower
from kvstore.protocol.errors import Closed, KVStoreError, StaleEpoch


class MemoryCatalog(Catalog):
    """A catalog that accepts commits and stores nothing. Calls `done` before `commit` returns. One thread at a time
    may call it."""

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
        """See Catalog. The election is immediate: no records and no other masters exist.

        The epoch is the wall clock's time, which only operators compare. Nodes compare identities, and each start
        has a new one: a clock that is set back does no harm."""
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
