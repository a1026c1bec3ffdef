"""Which role this master has, as the catalog says: it follows the records that another master writes, or it owns them.

It makes the one from the other when it is elected, and begins anew when it is deposed. In between it may be cut off: its lease is over,
and the catalog cannot be reached, so that nobody knows whether another master has taken over. Then it writes nothing and goes on answering
questions, for nodes refuse what is wrong of the answers, until it hears of the catalog or most nodes leave it. The loop is the only caller.
"""

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

IS_CUT_OFF: Final = "this master is cut off from its catalog, so nothing can be changed: `kvstore status` says why"


class MasterRole(enum.StrEnum):
    OWNER = "owner"
    FOLLOWING = "following"
    CUT_OFF = "cut off"


class RoleManager:
    """A catalog's Follower, called in the loop's thread (partition.py)."""

    def __init__(
        self, address: str, lead: Callable[[int, FollowedRecords], LeaderRole], *, on_change: Callable[[], None], what: str = "the catalog"
    ) -> None:
        """`lead` makes the owner of an epoch on the records followed so far. `on_change` is called at each change of the role, and of the
        owner that is followed. An owner at this master's own `address` is the one that died in this place, and nobody."""
        self._address = address
        self._what = what
        """What is owned, for the log."""
        self._lead = lead
        self._on_change = on_change
        self._followed = FollowedRecords()
        self._former: Mapping[str, NamedLimits] | None = None
        """Operators' limits as they were known before the catalog is listed anew, until it has been: else nobody had a limit meanwhile."""
        self._leading: LeaderRole | None = None
        self._is_open = False
        """What it may grant is durable: it serves."""
        self._is_cut_off = False
        self._linked_nodes = 0
        """When it was cut off."""
        self.owner: CatalogOwner | None = None
        """Whom this master follows; None for nobody, and while it is the owner itself."""

    @property
    def role(self) -> MasterRole:
        if not self._is_open:
            return MasterRole.FOLLOWING
        return MasterRole.CUT_OFF if self._is_cut_off else MasterRole.OWNER

    def leading(self) -> LeaderRole:
        """The owner that this master is. Raises Unavailable, which names the one to ask instead."""
        if self._is_cut_off:
            raise Unavailable(IS_CUT_OFF)
        return self.answering()

    def answering(self) -> LeaderRole:
        """The owner that this master is, or was last as far as it knows: for questions. Raises Unavailable."""
        if self._leading is None or not self._is_open:
            raise refusal(self.owner)
        return self._leading

    def operator_quotas(self) -> Mapping[str, NamedLimits] | None:
        """What operators have set of tenants' limits, as the catalog that is followed has it, another mapping after each change; None for
        the owner, who has it first."""
        return self._limits() if self._leading is None else None

    def _limits(self) -> Mapping[str, NamedLimits]:
        if self._leading is not None:
            return self._leading.directory.operator_quotas.tenants
        return self._former if self._former is not None else self._followed.operator_quotas()

    def audit(self) -> AuditLog:
        """The audit trail, as the catalog has it; complete in partition 0 only."""
        return self._followed.audit if self._leading is None else self._leading.directory.audit

    def queries(self, live: Iterable[int]) -> DirectoryQueries:
        """What is asked of the directory, whoever owns it: of another's as its records are, with these nodes taken to be alive."""
        return DirectoryQueries(*self.columns(live)) if self._leading is None else self._leading.directory.queries

    def columns(self, live: Iterable[int]) -> tuple[Rows, Tenants]:
        """As `queries`, of the tables themselves."""
        if self._leading is not None:
            return self._leading.directory.columns()
        self._followed.rows.sets.set_live(live)
        return self._followed.rows, self._followed.tenants

    def records(self) -> int:
        """Blocks that have a record in the catalog, as far as this master knows."""
        return self._followed.blocks() if self._leading is None else self._leading.directory.recording.count()

    def tick(self) -> None:
        """Let time pass. While it is cut off nobody dies of silence: nodes are told to look for another master."""
        if self._leading is None or not self._is_open:
            self._followed.tick()
        elif not self._is_cut_off:
            self._leading.tick()
        elif self._is_left(self._leading):
            log.warning("most nodes have left this master, which is cut off: another one may own the catalog")
            self._stand_by()
            self._on_change()

    def _is_left(self, leading: LeaderRole) -> bool:
        """Whether most nodes have closed their links, as they do once another master owns the catalog. A dead node's closes, too."""
        return 2 * (self._linked_nodes - leading.linked_nodes()) > self._linked_nodes

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
            f"{owner.name} at {owner.address}, epoch {owner.epoch}, of {self._what}" if owner else f"{self._what}, which nobody owns",
            extra=named("owner_followed", owner=owner.address if owner else "", epoch=owner.epoch if owner else 0),
        )
        self._on_change()

    def elected(self, epoch: int) -> None:
        self.owner = self._former = None
        leading = self._leading = self._lead(epoch, self._followed)

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

        leading.begin(opened)  # which is not called once it has ended

    def deposed(self, why: KVStoreError) -> None:
        """Raises Corrupt, if that is why: there is nothing to stand by for."""
        if isinstance(why, Corrupt):
            raise why
        if self._leading is None or self._is_cut_off:
            return
        log.warning("this master owns %s no longer: %s", self._what, why, extra=named("owner_deposed", why=why))
        self._leading.end(why)
        if self._is_open:
            self._is_cut_off, self._linked_nodes = True, self._leading.linked_nodes()
        else:
            self._stand_by()
        self._on_change()

    def close(self, why: KVStoreError) -> None:
        """The master stops: who waits for the catalog is told."""
        if self._leading is not None:
            self._leading.end(why)

    def _stand_by(self) -> None:
        """Nothing is known of the catalog, but for limits."""
        had_led, self._former = self._leading is not None, self._limits()
        self._leading, self._is_open, self._is_cut_off = None, False, False
        self.owner, self._followed = None, FollowedRecords()
        if had_led:
            gc.unfreeze()  # it may have been made before the daemon froze what it had (rpc/daemon.py)
            gc.collect()  # its parts refer to one another: else there would be two tables until the collector comes by
