"""Tests of role_manager.py: from following to owning and back, without sockets or a shared catalog."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvstore.master.audit_trail import AuditTrail
from kvstore.master.catalogs.interface import BlockPuts, CatalogOwner
from kvstore.master.catalogs.memory import MemoryCatalog
from kvstore.master.config import MasterSettings
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.index.queries import DirectoryQueries
from kvstore.master.directory.records import delete_quota, put_quota
from kvstore.master.leadership.leader import LeaderRole
from kvstore.master.leadership.role_manager import MasterRole, RoleManager
from kvstore.master.server.frames_service import MasterContactInfo
from kvstore.master.server.owner_parts import MasterParts
from kvstore.protocol.errors import Corrupt, StaleEpoch, Unavailable
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.tenant_loads import TenantLoads
from kvstore.security.authenticator import Authenticator
from kvstore.security.quotas.limits import QuotasInForce
from tests.master.catalogs.conformance import elected
from tests.master.leadership.held import Held, Place

OTHER = CatalogOwner("other", "other:7440", 3)
OVER = StaleEpoch("the lease is over")
BLOCK = BlockPuts("red", [b"a"], [1], [2], [3], ["ns"], [b""], [(1,)])


class Stage:
    """A Standing whose owners are made on a catalog in memory; `linked` nodes are connected to them."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.roles: list[tuple[MasterRole, CatalogOwner | None]] = []
        self.linked = 2
        self.catalog: MemoryCatalog | None = None
        """Another catalog."""
        self.role_manager = RoleManager(
            "me:7440", self._lead, on_change=lambda: self.roles.append((self.role_manager.role, self.role_manager.owner))
        )

    def _lead(self, epoch: int, followed: FollowedRecords) -> LeaderRole:
        class Linked(LeaderRole):
            def connected_nodes(_self) -> int:  # noqa: N805
                return self.linked

        catalog = MemoryCatalog()
        elected(catalog)
        trail = AuditTrail(self.reactor, wall_s=lambda: 0.0)
        master = MasterParts(self.reactor, MasterSettings(), Authenticator(""), QuotasInForce(""), TenantLoads(), trail)
        reachable = MasterContactInfo("", "", "", "", 0)
        return Linked(master, self.catalog or catalog, Place(0), reachable, epoch=epoch, followed=followed, wall_ns=1000)


@pytest.fixture
def stage() -> Iterator[Stage]:
    reactor = Reactor()
    yield Stage(reactor)
    reactor.close()


def test_who_follows_says_whom_to_ask(stage: Stage) -> None:
    role_manager = stage.role_manager
    role_manager.begin()
    with pytest.raises(Unavailable, match="no master owns the catalog now"):
        role_manager.leader()
    role_manager.take([BLOCK])
    role_manager.owned_by(OTHER)
    with pytest.raises(Unavailable, match="this master stands by: ask other:7440"):
        role_manager.readable_leader()
    role_manager.run_due()
    assert (role_manager.records(), stage.roles) == (1, [(MasterRole.FOLLOWING, None), (MasterRole.FOLLOWING, OTHER)])
    role_manager.close(OVER)


def test_an_owner_that_died_in_this_place_is_nobody(stage: Stage) -> None:
    stage.role_manager.begin()
    stage.role_manager.owned_by(CatalogOwner("before", "me:7440", 3))
    with pytest.raises(Unavailable, match="no master owns the catalog now"):
        stage.role_manager.leader()


def test_who_is_elected_stands_on_what_it_has_followed(stage: Stage) -> None:
    role_manager = stage.role_manager
    role_manager.begin()
    role_manager.take([BLOCK])
    role_manager.owned_by(OTHER)
    role_manager.elected(9)
    assert stage.roles[-1] == (MasterRole.OWNER, None)
    assert (role_manager.leader().epoch, role_manager.readable_leader(), role_manager.records()) == (9, role_manager.leader(), 0), (
        "its holder is not known"
    )
    role_manager.run_due()
    role_manager.close(OVER)


@pytest.mark.promise("failover")
def test_deposed_owner_serves_reads_until_the_catalog_returns(stage: Stage) -> None:
    role_manager = stage.role_manager
    role_manager.begin()
    role_manager.elected(9)
    readable_leader = role_manager.leader()
    role_manager.deposed(OVER)
    role_manager.deposed(OVER)
    assert stage.roles[-2:] == [(MasterRole.OWNER, None), (MasterRole.CUT_OFF, None)]
    with pytest.raises(Unavailable, match="cut off"):
        role_manager.leader()
    assert role_manager.readable_leader() is readable_leader
    role_manager.run_due()
    role_manager.begin()
    assert stage.roles[-1] == (MasterRole.FOLLOWING, None)
    with pytest.raises(Unavailable):
        role_manager.readable_leader()
    role_manager.take([BLOCK])
    role_manager.elected(12)
    assert role_manager.leader().epoch == 12


def test_nobody_is_served_before_what_may_be_granted_is_durable(stage: Stage) -> None:
    catalog = stage.catalog = Held()
    role_manager = stage.role_manager
    role_manager.begin()
    role_manager.elected(9)
    role_manager.run_due()
    assert role_manager.role is MasterRole.FOLLOWING
    with pytest.raises(Unavailable, match="no master owns the catalog now"):
        role_manager.leader()
    role_manager.deposed(OVER)
    assert (role_manager.role, stage.roles[-1]) == (MasterRole.FOLLOWING, (MasterRole.FOLLOWING, None))
    catalog.commits[0][1](None)
    assert role_manager.role is MasterRole.FOLLOWING, "it has ended meanwhile"
    role_manager.elected(12)
    catalog.commits[1][1](None)
    assert role_manager.leader().epoch == 12


def test_nothing_is_left_of_an_owner_that_was(stage: Stage) -> None:
    role_manager = stage.role_manager
    role_manager.begin()
    role_manager.elected(9)
    former = weakref.ref(role_manager.leader())
    gc.freeze()  # as a daemon does once it is ready
    role_manager.deposed(OVER)
    role_manager.begin()
    assert former() is None


@pytest.mark.promise("etcd-outage")
def test_standing_cut_off_ends_when_most_nodes_left(stage: Stage) -> None:
    role_manager = stage.role_manager
    role_manager.begin()
    role_manager.elected(9)
    role_manager.deposed(OVER)
    for stage.linked in (2, 1):
        role_manager.run_due()
        assert role_manager.role is MasterRole.CUT_OFF, "one of two may have died"
    stage.linked = 0
    role_manager.run_due()
    assert stage.roles[-1] == (MasterRole.FOLLOWING, None)
    assert role_manager.records() == 0


def test_a_damaged_catalog_is_no_reason_to_stand_by(stage: Stage) -> None:
    with pytest.raises(Corrupt):
        stage.role_manager.deposed(Corrupt("damaged"))
    stage.role_manager.deposed(OVER)
    assert stage.roles == []


def test_follower_queries_records_with_given_live_nodes(stage: Stage) -> None:
    role_manager = stage.role_manager
    role_manager.begin()
    role_manager.take([BLOCK, put_quota("red", {"pins": 5})])
    role_manager.owned_by(OTHER)
    assert role_manager.queries([2]).exists("red", [b"a"]) == b"\0"
    assert role_manager.queries([1]).exists("red", [b"a", b"b"]) == b"\1\0"
    rows, tenants = role_manager.columns([1])
    assert DirectoryQueries(rows, tenants).exists("red", [b"a"]) == b"\1"
    assert role_manager.operator_quotas() == {"red": {"pins": 5}}
    role_manager.elected(9)
    assert role_manager.operator_quotas() is None
    assert role_manager.queries([1]) is role_manager.leader().directory.queries
    assert role_manager.columns([1]) == role_manager.leader().directory.columns()
    role_manager.close(OVER)


def test_quotas_hold_during_a_new_listing(stage: Stage) -> None:
    role_manager = stage.role_manager
    role_manager.begin()
    role_manager.take([put_quota("red", {"pins": 5})])
    role_manager.owned_by(OTHER)
    for _ in range(2):
        known = role_manager.operator_quotas()
        role_manager.begin()
        role_manager.begin()
        role_manager.take([put_quota("blue", {"pins": 1})])
        assert role_manager.operator_quotas() == known == {"red": {"pins": 5}}
        role_manager.take([put_quota("red", {"pins": 5}), delete_quota("blue")])
        role_manager.owned_by(None)
    role_manager.elected(9)
    role_manager.deposed(OVER)
    role_manager.begin()
    assert role_manager.operator_quotas() == {"red": {"pins": 5}}, "it had owned it itself"
    role_manager.owned_by(OTHER)
    assert role_manager.operator_quotas() == {}, "they have been cleared meanwhile"
