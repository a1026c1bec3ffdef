"""The catalog: where the directory's records survive the master, and by which masters agree on who owns them.

A durable map of records with group commit, an owner at a time, and followers; one for each partition of the key space. Every master that
opens a catalog follows it: it is given all records there are, then every change, in order, and is elected when nobody else owns it. The
owner's epoch is larger than that of every earlier owner; a former owner's writes fail from its end on with StaleEpoch.

    memory:   one process, elected at once; keeps nothing
    lmdb:     one process at a time; a second one is refused at `open`
    etcd:     many masters; the owner holds a key under a lease, which etcd ends when the owner is not heard from
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, Protocol

from kvstore.protocol.errors import ConfigError, KVStoreError
from kvstore.telemetry.metrics.histogram import Histogram, HistogramSnapshot

IDENTITY_BYTES: Final = 8
"""Random bytes of an identity, in hexadecimal digits: two catalogs of one cluster are as good as never the same."""


class Op(NamedTuple):
    """Set the small record `key` (1 to 400 bytes of any content) to `value` (up to 64 KiB), or delete it when `value` is None."""

    key: bytes
    value: bytes | None


class BlockPuts(NamedTuple):
    """Set the records of these blocks of one tenant, columns of one length. What had a record under a key is replaced.

    Keys are 1 to 255 bytes long and each named once, tenants up to 128 bytes, namespaces and parents up to 255; sizes, checksums and
    generations are below 2**64, holders below 2**32 and at most 65,535.
    """

    tenant: str
    keys: Sequence[bytes]
    sizes: Sequence[int]
    checksums: Sequence[int]
    generations: Sequence[int]
    namespaces: Sequence[str]
    parents: Sequence[bytes]
    """b"" for none."""
    holders: Sequence[tuple[int, ...]]
    """Node ids, ascending."""


class BlockDeletes(NamedTuple):
    """Delete the records of these blocks of one tenant; one that has none is no error."""

    tenant: str
    keys: Sequence[bytes]


Change = Op | BlockPuts | BlockDeletes


class Candidate(NamedTuple):
    """A master that would own the catalog: its name, and where clients and nodes reach it (frames, HOST:PORT)."""

    name: str
    address: str


class MasterContact(NamedTuple):
    """How a master is asked by its fellows: where its control plane is (HOST:PORT), and the key that it asks them for
    (security/authenticator.py)."""

    control: str = ""
    key: str = ""


class PeerMaster(NamedTuple):
    """Another master of the cluster that lives."""

    name: str
    contact: MasterContact


class CatalogOwner(NamedTuple):
    """Who owns the catalog: a Candidate, and the epoch it was elected with."""

    name: str
    address: str
    epoch: int


Done = Callable[[KVStoreError | None], None]
"""Called exactly once a commit: None when its changes are durable, StaleEpoch when this master does not own the catalog, or not any more,
Closed when the catalog was closed first. May be called in the catalog's own thread, or before `commit` returns: it must only hand over."""


class Follower(Protocol):
    """What a catalog tells the master that follows it. Called in the catalog's own thread, one call at a time, in order; a call may block
    (the catalog waits with what comes next), and must not call the catalog back."""

    def begin(self) -> None:
        """All records follow, from nothing: forget what was taken so far. At the start, and when what was missed is not to be had."""

    def take(self, changes: Sequence[Change]) -> None:
        """In their order; deletions of what is not there do nothing."""

    def owned_by(self, owner: CatalogOwner | None) -> None:
        """Somebody else (or nobody) owns the catalog from now on. Also said once after the first listing."""

    def elected(self, epoch: int) -> None:
        """This master owns the catalog from now on, and has been given all that any owner before it made durable."""

    def deposed(self, why: KVStoreError) -> None:
        """It owns it no longer: another took over, or its lease could not be kept for so long that another may have. Or it cannot be
        elected, since the catalog is damaged (Corrupt).

        Every commit under way or to come fails with StaleEpoch until it is elected again. What follows is begin(), take()... anew.
        """


class CommitStats(NamedTuple):
    """How long groups of commits took until they were durable, how many batches wait now, and how many bytes the place takes, 0 where that
    is not known."""

    durations: HistogramSnapshot
    waiting: int = 0
    size_bytes: int = 0


NO_FELLOWS: Final[Mapping[str, PeerMaster]] = MappingProxyType({})
NOTHING_WRITTEN: Final = CommitStats(Histogram().counts())


def check_partitions(place: str, made_of: int, wanted: int) -> None:
    """Raises ConfigError where the catalog at `place` was made for another number of partitions than are wanted."""
    if made_of != wanted:
        raise ConfigError(
            f"{place}: the catalog was made for a key space of {made_of} partitions, and the setting `partitions` is {wanted}: "
            "the number stays what it was when the cluster was made"
        )


class Catalog(ABC):
    """See the module. `commit` may be called from one thread while `health` is read from any."""

    scheme: ClassVar[str]
    wait_s: Callable[[], float] = staticmethod(lambda: 0.0)
    """How long to leave the catalog to other masters when nobody owns it; asked in the catalog's own thread. To be set before `follow`."""
    contact: MasterContact = MasterContact()
    """How this master is asked, for the others. To be set before `follow`."""

    @property
    def living(self) -> frozenset[str]:
        """Addresses of the masters that live, where several share the partitions out; none while that is not known, and of a catalog that
        is not the first partition's."""
        return frozenset()

    @property
    def fellows(self) -> Mapping[str, PeerMaster]:
        """The other masters that live, by the address of their frames, as far as is known; none where there can be no other, and of a
        catalog that is not the first partition's. Any thread may ask."""
        return NO_FELLOWS

    def give_up(self) -> None:
        """Own it no longer, for another master that lives: as if another had taken over. Nothing where there can be no other."""

    @abstractmethod
    def open(self, *, deadline_s: float) -> None:
        """Reach the place; the identity is known from here on. Call once, first.

        Raises CatalogUnavailable (not reachable within `deadline_s`), ConfigError (the place cannot be a catalog).
        """

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells this catalog from every other, once it is open: made at random with the catalog, kept in it, and gone with it.

        Epochs are compared within one catalog only: those of another say nothing.
        """

    @property
    def shards(self) -> int:
        """Into how many parts the blocks' records are cut, once it is open; one owner owns all of them."""
        return 1

    @abstractmethod
    def follow(self, me: Candidate, follower: Follower) -> None:
        """Tell `follower` of records and owners from now on, in a thread of its own, and stand for election. Call once after `open`."""

    @abstractmethod
    def commit(self, changes: Sequence[Change], done: Done) -> None:
        """Make `changes` durable together with whatever else is waiting (group commit), then call `done`.

        Batches of one catalog take effect in the order of their calls, so a later change of a key wins; within a batch too. A
        batch may become durable in parts if the process dies. While the place is unreachable the batch waits and is tried
        again with back-off: it does not fail for that reason (callers have deadlines of their own) while this master owns the catalog,
        and `health` tells. Raises InvalidArgument for a change over the limits: nothing of the batch is taken then.
        """

    @property
    @abstractmethod
    def health(self) -> str:
        """`ok`, or one line that says what is wrong, for `status`."""

    @property
    def outage(self) -> str:
        """One sentence while the place of all partitions serves nobody, else ""."""
        return ""

    @property
    def written(self) -> "CommitStats":
        """What was written so far, and what waits."""
        return NOTHING_WRITTEN

    @abstractmethod
    def close(self) -> None:
        """Stop taking commits; those waiting get one last try within a second, then `done(Closed)`. A second close is a no-op.

        The owner gives its ownership up at once (etcd: its lease is revoked), so that a standby need not wait for it to end. The follower
        is told nothing any more.
        """
