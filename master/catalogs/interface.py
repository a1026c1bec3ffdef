"""Interface of a catalog: durable storage of a partition's records, and election of the master that owns them.

A catalog is a durable map with group commit, one owner at a time, and followers. Every master that opens it follows it:
it receives all records, then every change in order. A follower is elected when no master owns the catalog. Each owner's
epoch is larger than all earlier ones; writes of a former owner fail with StaleEpoch.

    memory:   one process, elected at once; nothing is durable
    lmdb:     one process at a time; `open` refuses a second one
    etcd:     many masters; the owner holds a key under a lease, which expires when it is not renewed"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, Protocol

from kvstore.protocol.errors import ConfigError, KVStoreError
from kvstore.telemetry.metrics.histogram import Histogram, HistogramSnapshot

IDENTITY_BYTES: Final = 8
"""Random bytes of an identity, written in hexadecimal digits."""


class Op(NamedTuple):
    """Set the small record `key` (1 to 400 bytes) to `value` (up to 64 KiB), or delete it if `value` is None."""

    key: bytes
    value: bytes | None


class BlockPuts(NamedTuple):
    """Set the records of blocks of one tenant, in columns of one length. Existing records are replaced.

    Keys are 1 to 255 bytes long and distinct, tenants up to 128 bytes, namespaces and parents up to 255. Sizes,
    checksums and generations are below 2**64, holders below 2**32 and at most 65,535."""

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
    """Delete the records of blocks of one tenant; missing ones are ignored."""

    tenant: str
    keys: Sequence[bytes]


Change = Op | BlockPuts | BlockDeletes


class Candidate(NamedTuple):
    """A master that campaigns for the catalog: its name, and its frames address (HOST:PORT) for clients and nodes."""

    name: str
    address: str


class MasterContact(NamedTuple):
    """Contact for other masters: control plane address (HOST:PORT), and the key that they present
    (security/authenticator.py)."""

    control: str = ""
    key: str = ""


class PeerMaster(NamedTuple):
    """Another live master of the cluster."""

    name: str
    contact: MasterContact


class CatalogOwner(NamedTuple):
    """The catalog's owner: a Candidate and its epoch."""

    name: str
    address: str
    epoch: int


Done = Callable[[KVStoreError | None], None]
"""Completion callback of a commit, called exactly once: None when the changes are durable, StaleEpoch when this
master does not own the catalog, Closed when the catalog was closed first. It may run in the catalog's thread, or
before `commit` returns: it must not block."""


class Follower(Protocol):
    """Receiver of a catalog's records and elections. Called in the catalog's thread, one call at a time, in order.

    A call may block, which delays the next; it must not call the catalog back."""

    def begin(self) -> None:
        """Drop all records: a full listing follows. Called at the start, and when changes were missed."""

    def take(self, changes: Sequence[Change]) -> None:
        """Apply changes in order; deletions of absent records do nothing."""

    def owned_by(self, owner: CatalogOwner | None) -> None:
        """Another master, or none, owns the catalog from now on. Also called once after the first listing."""

    def elected(self, epoch: int) -> None:
        """This master owns the catalog from now on, and has received all durable changes of former owners."""

    def deposed(self, why: KVStoreError) -> None:
        """This master lost the catalog: its lease expired or another took over. Or it cannot be elected, since the
        catalog is damaged (Corrupt).

        All commits fail with StaleEpoch until it is elected again. Next, `begin` and a new listing follow."""


class CommitStats(NamedTuple):
    """Durations of group commits, batches queued now, and bytes of storage (0: unknown)."""

    durations: HistogramSnapshot
    waiting: int = 0
    size_bytes: int = 0


NO_PEERS: Final[Mapping[str, PeerMaster]] = MappingProxyType({})
NOTHING_WRITTEN: Final = CommitStats(Histogram().counts())


def check_partitions(place: str, made_of: int, wanted: int) -> None:
    """Raise ConfigError if the catalog at `place` has another number of partitions."""
    if made_of != wanted:
        raise ConfigError(
            f"{place}: the catalog was made for a key space of {made_of} partitions, and the setting `partitions` is {wanted}: "
            "the number stays what it was when the cluster was made"
        )


class Catalog(ABC):
    """Durable records of one partition, see the module. `commit` is called by one thread; `health` may be read by
    any."""

    scheme: ClassVar[str]
    wait_s: Callable[[], float] = staticmethod(lambda: 0.0)
    """Seconds to leave the election to other masters. Called in the catalog's thread; set before `follow`."""
    contact: MasterContact = MasterContact()
    """Contact for other masters; set before `follow`."""

    @property
    def live_masters(self) -> frozenset[str]:
        """Addresses of the live masters, for sharing out partitions. Empty while unknown, and in catalogs of other
        than the first partition."""
        return frozenset()

    @property
    def peer_masters(self) -> Mapping[str, PeerMaster]:
        """The other live masters by frames address, as last known. Empty in catalogs of other than the first
        partition, and where only one master is possible. Thread-safe."""
        return NO_PEERS

    def give_up(self) -> None:
        """Give up the ownership, as if another master had taken over. Does nothing where only one master is
        possible."""

    @abstractmethod
    def open(self, *, deadline_s: float) -> None:
        """Open the storage and read the identity. Call once, first.

        Raises CatalogUnavailable (not reachable within `deadline_s`), ConfigError (the storage cannot be a catalog)."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Random id of this catalog, made and stored with it; known after `open`.

        Epochs are comparable within one catalog only."""

    @property
    def shards(self) -> int:
        """Number of shards of the block records; known after `open`. One owner owns all of them."""
        return 1

    @abstractmethod
    def follow(self, me: Candidate, follower: Follower) -> None:
        """Notify `follower` of records and owners, in a thread of the catalog, and campaign. Call once after `open`."""

    @abstractmethod
    def commit(self, changes: Sequence[Change], done: Done) -> None:
        """Make `changes` durable together with other queued batches (group commit), then call `done`.

        Batches of a catalog take effect in the order of their calls, as changes within a batch do. A process that
        dies may leave a batch durable in part. While the storage is unreachable, and this master owns the catalog,
        the batch is retried with back-off and does not fail: callers have deadlines, and `health` reports the
        outage. Raises InvalidArgument for a change over the limits; then nothing of the batch is taken."""

    @property
    @abstractmethod
    def health(self) -> str:
        """`ok`, or one line about what is wrong, for `status`."""

    @property
    def outage(self) -> str:
        """One sentence while the storage of all partitions serves no requests, else ""."""
        return ""

    @property
    def written(self) -> "CommitStats":
        """Statistics of commits."""
        return NOTHING_WRITTEN

    @abstractmethod
    def close(self) -> None:
        """Take no more commits; queued ones get one last attempt within a second, then `done(Closed)`. Idempotent.

        The owner gives up its ownership at once (etcd: revokes its lease), so that a standby need not wait for its
        end. The follower gets no more calls."""
