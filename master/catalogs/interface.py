"""The catalog: where the directory's records survive the master. A durable map of bytes with group commit and an owner's epoch.

It knows nothing of blocks: the directory packs its records. One master owns a catalog at a time; opening it raises the epoch,
and a former owner's writes fail from then on with StaleEpoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

from kvstore.protocol.errors import KVStoreError

IDENTITY_BYTES: Final = 8
"""Random bytes of an identity, in hexadecimal digits: two catalogs of one cluster are as good as never the same."""


class Op(NamedTuple):
    """Set `key` to `value`, or delete it when `value` is None. Keys are 1 to 400 bytes of any content, values up to 64 KiB."""

    key: bytes
    value: bytes | None


Done = Callable[[KVStoreError | None], None]
"""Called exactly once a commit: None when its operations are durable, StaleEpoch when another master took over, Closed when the
catalog was closed first. May be called in the catalog's own thread, or before `commit` returns: it must only hand over."""


class Catalog(ABC):
    """See the module. `commit` may be called from one thread while `health` is read from any."""

    scheme: ClassVar[str]

    @abstractmethod
    def open(self, *, deadline_s: float) -> int:
        """Take ownership and return this owner's epoch, larger than that of every earlier owner. Call once, first.

        Raises CatalogUnavailable (not reachable within `deadline_s`), ConfigError (the place cannot be a catalog).
        """

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells this catalog from every other, once it is open: made at random with the catalog, kept in it, and gone with it.

        Epochs are compared within one catalog only: those of another say nothing.
        """

    @abstractmethod
    def load(self) -> Iterator[tuple[bytes, bytes]]:
        """Every (key, value), in key order, as of the `open`. Reads in pages, so that a million records need no second copy."""

    @abstractmethod
    def commit(self, ops: Sequence[Op], done: Done) -> None:
        """Make `ops` durable together with whatever else is waiting (group commit), then call `done`.

        Batches of one catalog take effect in the order of their calls, so a later operation on a key wins; within a batch too. A
        batch may become durable in parts if the process dies. While the place is unreachable the batch waits and is tried
        again with back-off: it never fails for that reason (callers have deadlines of their own), and `health` tells.
        """

    @property
    @abstractmethod
    def health(self) -> str:
        """`ok`, or one line that says what is wrong, for `status`."""

    @abstractmethod
    def close(self) -> None:
        """Stop taking commits; those waiting get one last try within a second, then `done(Closed)`. A second close is a no-op."""
