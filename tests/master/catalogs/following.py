"""A follower that keeps small records and blocks as dictionaries, the naive form of the directory's."""

import threading
from collections.abc import Callable, Sequence

from kvstore.master.catalogs.interface import BlockPuts, CatalogOwner, Change, Op
from kvstore.protocol.errors import KVStoreError

DEADLINE_S = 60.0


class Following:
    """`records` and `blocks` by (tenant, key) as of now; `told` is every call but `take`, in order."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.blocks: dict[tuple[str, bytes], object] = {}
        self.told: list[str] = []
        self.epoch = 0
        self.owner: CatalogOwner | None = None
        self.why: KVStoreError | None = None
        self.hold = threading.Event()
        """Until it is set, calls of `take` block."""
        self.hold.set()
        self._changed = threading.Condition()

    def begin(self) -> None:
        self._tell("begin")
        self.records, self.blocks = {}, {}

    def take(self, changes: Sequence[Change]) -> None:
        assert self.hold.wait(DEADLINE_S)
        with self._changed:
            for change in changes:
                if isinstance(change, Op):
                    if change.value is None:
                        self.records.pop(change.key, None)
                    else:
                        self.records[change.key] = change.value
                elif isinstance(change, BlockPuts):
                    for key, *version in zip(*change[1:], strict=True):
                        self.blocks[change.tenant, key] = tuple(version)
                else:
                    for key in change.keys:
                        self.blocks.pop((change.tenant, key), None)
            self._changed.notify_all()

    def owned_by(self, owner: CatalogOwner | None) -> None:
        self.owner = owner
        self._tell(f"owned by {owner and owner.name}")

    def elected(self, epoch: int) -> None:
        self.epoch = epoch
        self._tell("elected")

    def deposed(self, why: KVStoreError) -> None:
        self.epoch, self.why = 0, why
        self._tell("deposed")

    def wait(self, what: Callable[[], bool]) -> None:
        """Until it is so."""
        with self._changed:
            assert self._changed.wait_for(what, DEADLINE_S), self.told

    def await_elected(self) -> int:
        self.wait(lambda: self.epoch > 0)
        return self.epoch

    def await_told(self, what: str, times: int = 1) -> None:
        self.wait(lambda: self.told.count(what) >= times)

    def _tell(self, what: str) -> None:
        with self._changed:
            self.told.append(what)
            self._changed.notify_all()
