"""Role of this master in one partition: follower, owner, or cut off.

It follows the catalog, becomes the owner when it is elected, and starts over when it is deposed. In between it may
be cut off: its lease has expired and the catalog is unreachable, so another master may own it. A cut-off master
writes nothing but still serves reads, since nodes refuse stale accesses. This ends when the catalog is reachable, or
most nodes have disconnected. The loop is the only caller."""

import enum
import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from kvstore.master.catalogs.interface import CatalogOwner, Change
from kvstore.master.directory.audit_log import AuditLog
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.index.queries import DirectoryQueries
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenants
from kvstore.master.leadership.leader import LeaderRole
from kvstore.master.server.partition_router import refusal
from kvstore.protocol.errors import Corrupt, KVStoreError, Unavailable
from kvstore.security.quotas.limits import NamedLimits
from kvstore.telemetry.logs import named

log = logging.getLogger("kvstore.master")

IS_CUT_OFF: Final = "this master is cut off from its catalog, so nothing can be changed: see `kvstore status` for the cause"


class MasterRole(enum.StrEnum):
    """Role of a master in a partition."""

    OWNER = "owner"
    FOLLOWING = "following"
    CUT_OFF = "cut off"


class RoleManager:
    """A catalog's Follower, called in the loop's thread (partition.py)."""

    def __init__(
        self, address: str, lead: Callable[[int, FollowedRecords], LeaderRole], *, on_change: Callable[[], None], what: str = "the catalog"
    ) -> None:
        """`lead` makes the owner of an epoch on the followed records. `on_change` is called at each change of the
        role or owner. An owner at this master's own `address` is its former process, and counts as none."""
        self._address = address
        self._what = what
        """Description of the partition, for the log."""
        self._lead = lead
        self._on_change = on_change
        self._followed = FollowedRecords()
        self._former: Mapping[str, NamedLimits] | None = None
        """Operators' limits from before a new listing, used until it is complete: otherwise no limits would apply
        meanwhile."""
        self._leader: LeaderRole | None = None
        self._is_open = False
        """True once it serves: the generations to be granted are durable."""
        self._is_cut_off = False
        self._connected_nodes = 0
        """Number of connected nodes when it was cut off."""
        self.owner: CatalogOwner | None = None
        """The owner that this master follows; None if there is none, or it is the owner itself."""

    @property
    def role(self) -> MasterRole:
        if not self._is_open:
            return MasterRole.FOLLOWING
        return MasterRole.CUT_OFF if self._is_cut_off else MasterRole.OWNER

    def leader(self) -> LeaderRole:
        """Return the owner role. Raises Unavailable, which names the current owner."""
        if self._is_cut_off:
            raise Unavailable(IS_CUT_OFF)
        return self.readable_leader()

    def readable_leader(self) -> LeaderRole:
        """Return the owner role, also while cut off, for reads. Raises Unavailable."""
        if self._leader is None or not self._is_open:
            raise refusal(self.owner)
        return self._leader

    def operator_quotas(self) -> Mapping[str, NamedLimits] | None:
        """Return the followed limits of operators, a new mapping after each change; None at the owner."""
        return self._limits() if self._leader is None else None

    def _limits(self) -> Mapping[str, NamedLimits]:
        if self._leader is not None:
            return self._leader.directory.operator_quotas.tenants
        return self._former if self._former is not None else self._followed.operator_quotas()

    def audit(self) -> AuditLog:
        """Return the audit trail; complete in partition 0 only."""
        return self._followed.audit if self._leader is None else self._leader.directory.audit

    def queries(self, live: Iterable[int]) -> DirectoryQueries:
        """Return lookups in the partition, at the owner and at a follower. A follower uses records, with `live` as
        the live nodes."""
        return DirectoryQueries(*self.columns(live)) if self._leader is None else self._leader.directory.queries

    def columns(self, live: Iterable[int]) -> tuple[Rows, Tenants]:
        """As `queries`, but the tables."""
        if self._leader is not None:
            return self._leader.directory.columns()
        self._followed.rows.sets.set_live(live)
        return self._followed.rows, self._followed.tenants

    def records(self) -> int:
        """Return the number of blocks with a record."""
        return self._followed.blocks() if self._leader is None else self._leader.directory.record_policy.count()

    def run_due(self) -> None:
        """Expire nodes and other state. While cut off no node is declared dead; heartbeats fail, so that nodes look
        for another master."""
        if self._leader is None or not self._is_open:
            self._followed.run_due()
        elif not self._is_cut_off:
            self._leader.run_due()
        elif self._has_lost_nodes(self._leader):
            log.warning("most nodes have disconnected from this master, which is cut off: another one may own the catalog")
            self._stand_by()
            self._on_change()

    def _has_lost_nodes(self, leader: LeaderRole) -> bool:
        """Return True if most nodes have disconnected, as they do when another master owns the catalog, or when they
        die."""
        return 2 * (self._connected_nodes - leader.connected_nodes()) > self._connected_nodes

    def begin(self) -> None:
        self._stand_by()
        self._on_change()

    def take(self, changes: Sequence[Change]) -> None:
        self._followed.take(changes)

    def owned_by(self, owner: CatalogOwner | None) -> None:
        if owner is not None and owner.address == self._address:
            owner = None
        self.owner, self._former = owner, None
        log.info(
            "following %s",
            f"{owner.name} at {owner.address}, epoch {owner.epoch}, of {self._what}" if owner else f"{self._what}, which has no owner",
            extra=named("owner_followed", owner=owner.address if owner else "", epoch=owner.epoch if owner else 0),
        )
        self._on_change()

    def elected(self, epoch: int) -> None:
        self.owner = self._former = None
        leader = self._leader = self._lead(epoch, self._followed)

        def opened() -> None:
            self._is_open = True
            log.info(
                "this master owns %s, epoch %d: %d blocks",
                self._what,
                epoch,
                self.records(),
                extra=named("owner_elected", epoch=epoch, blocks=self.records()),
            )
            self._on_change()

        leader.begin(opened)  # not called once it has ended

    def deposed(self, why: KVStoreError) -> None:
        """Raises Corrupt if that is `why`: the catalog cannot be followed."""
        if isinstance(why, Corrupt):
            raise why
        if self._leader is None or self._is_cut_off:
            return
        log.warning("this master owns %s no longer: %s", self._what, why, extra=named("owner_deposed", why=why))
        self._leader.end(why)
        if self._is_open:
            self._is_cut_off, self._connected_nodes = True, self._leader.connected_nodes()
        else:
            self._stand_by()
        self._on_change()

    def close(self, why: KVStoreError) -> None:
        """The master stops: fail calls that wait for the catalog."""
        if self._leader is not None:
            self._leader.end(why)

    def _stand_by(self) -> None:
        """Start over as a follower; only the limits are kept."""
        had_led, self._former = self._leader is not None, self._limits()
        self._leader, self._is_open, self._is_cut_off = None, False, False
        self.owner, self._followed = None, FollowedRecords()
        if had_led:
            gc.unfreeze()  # it may be among the objects that the daemon froze (rpc/daemon.py)
            gc.collect()  # its parts are a reference cycle: otherwise two tables would exist until the next collection
