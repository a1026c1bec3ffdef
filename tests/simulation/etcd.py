"""etcd as a model: what is durable of the catalogs of all partitions. One revision for all that is written, an owner's lease, writes that
compare the owner's epoch, and which masters live.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Candidate, CatalogOwner, Change, Op
from kvstore.protocol.errors import StaleEpoch
from tests.simulation.network import Network
from tests.simulation.world import S

HOST: Final = "etcd"
LEASE_NS: Final = 2 * S


@dataclass
class Shared:
    """State that the catalogs of all partitions share."""

    revision: int = 1
    masters: dict[str, int] = field(default_factory=dict)
    """Addresses of those that live, and until when their leases last."""

    def living(self, now_ns: int) -> frozenset[str]:
        return frozenset(address for address, until_ns in self.masters.items() if now_ns < until_ns)


@dataclass
class Etcd:
    """The store itself: what is durable of one partition's catalog."""

    network: Network
    identity: str
    shared: Shared = field(default_factory=Shared)
    records: dict[bytes, bytes] = field(default_factory=dict)
    blocks: dict[tuple[str, bytes], tuple[Any, ...]] = field(default_factory=dict)
    log: list[tuple[int, int, Sequence[Change]]] = field(default_factory=list)
    """(revision, writer's epoch, changes)."""
    owner: CatalogOwner | None = None
    fence: int = 0
    """The mod revision of the owner's key."""
    lease_until_ns: int = 0
    watchers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def revision(self) -> int:
        return self.shared.revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self.shared.revision = revision

    def expire(self, now_ns: int) -> None:
        if self.owner is not None and now_ns >= self.lease_until_ns:
            self.network.world.trace("etcd lease over", self.owner.epoch)
            self.release(self.owner.epoch)

    def release(self, epoch: int) -> None:
        if self.owner is not None and self.owner.epoch == epoch:
            self.owner = None
            self.revision += 1
            self._tell()

    def campaign(self, me: Candidate, now_ns: int) -> int:
        """The epoch that it has been elected with, 0: another one owns the catalog."""
        if self.owner is not None:
            return 0
        self.revision += 1
        self.owner, self.fence = CatalogOwner(me.name, me.address, self.revision), self.revision
        self.lease_until_ns = now_ns + LEASE_NS
        self.network.world.trace("etcd elects", me.name, self.revision)
        self._tell()
        return self.revision

    def keep_alive(self, epoch: int, now_ns: int) -> None:
        if self.owner is None or self.owner.epoch != epoch:
            raise StaleEpoch(f"epoch {epoch} is over")
        self.lease_until_ns = now_ns + LEASE_NS

    def write(self, epoch: int, fence: int, changes: Sequence[Change]) -> None:
        if self.owner is None or (self.owner.epoch, self.fence) != (epoch, fence):
            raise StaleEpoch(f"epoch {epoch} is over")
        self.carry_out(epoch, changes)

    def carry_out(self, epoch: int, changes: Sequence[Change]) -> None:
        """Apply changes, of any sender."""
        self.revision += 1
        for change in changes:
            self._apply(change)
        self.log.append((self.revision, epoch, changes))
        self._tell()

    def move_fence(self, epoch: int) -> int:
        """Advance the fence: writes in flight with an older epoch will not match."""
        if self.owner is None or self.owner.epoch != epoch:
            raise StaleEpoch(f"epoch {epoch} is over")
        self.revision += 1
        self.fence = self.revision
        return self.fence

    def listing(self) -> list[Change]:
        changes: list[Change] = [Op(key, value) for key, value in self.records.items()]
        for (tenant, key), version in self.blocks.items():
            changes.append(BlockPuts(tenant, [key], *([column] for column in version)))
        return changes

    def _apply(self, change: Change) -> None:
        if isinstance(change, Op):
            if change.value is None:
                self.records.pop(change.key, None)
            else:
                self.records[change.key] = change.value
        elif isinstance(change, BlockDeletes):
            for key in change.keys:
                self.blocks.pop((change.tenant, key), None)
        else:
            for key, *version in zip(*change[1:], strict=True):
                self.blocks[change.tenant, key] = tuple(version)

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()
