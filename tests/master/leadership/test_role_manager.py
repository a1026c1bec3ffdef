"""Promises of role_manager.py: from following to owning and back, without sockets or a shared catalog."""

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
        """Another one than is at hand."""
        self.standing = RoleManager("me:7440", self._lead, on_change=lambda: self.roles.append((self.standing.role, self.standing.owner)))

    def _lead(self, epoch: int, followed: FollowedRecords) -> LeaderRole:
        class Linked(LeaderRole):
            def linked_nodes(_self) -> int:  # noqa: N805
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
    standing = stage.standing
    standing.begin()
    with pytest.raises(Unavailable, match="no master owns the catalog now"):
        standing.leading()
    standing.take([BLOCK])
    standing.owned_by(OTHER)
    with pytest.raises(Unavailable, match="this master stands by: ask other:7440"):
        standing.answering()
    standing.tick()
    assert (standing.records(), stage.roles) == (1, [(MasterRole.FOLLOWING, None), (MasterRole.FOLLOWING, OTHER)])
    standing.close(OVER)


def test_an_owner_that_died_in_this_place_is_nobody(stage: Stage) -> None:
    stage.standing.begin()
    stage.standing.owned_by(CatalogOwner("before", "me:7440", 3))
    with pytest.raises(Unavailable, match="no master owns the catalog now"):
        stage.standing.leading()


def test_who_is_elected_stands_on_what_it_has_followed(stage: Stage) -> None:
    standing = stage.standing
    standing.begin()
    standing.take([BLOCK])
    standing.owned_by(OTHER)
    standing.elected(9)
    assert stage.roles[-1] == (MasterRole.OWNER, None)
    assert (standing.leading().epoch, standing.answering(), standing.records()) == (9, standing.leading(), 0), "its holder is not known"
    standing.tick()
    standing.close(OVER)


def test_who_is_deposed_answers_questions_until_it_hears_of_the_catalog(stage: Stage) -> None:
    standing = stage.standing
    standing.begin()
    standing.elected(9)
    answering = standing.leading()
    standing.deposed(OVER)
    standing.deposed(OVER)
    assert stage.roles[-2:] == [(MasterRole.OWNER, None), (MasterRole.CUT_OFF, None)]
    with pytest.raises(Unavailable, match="cut off"):
        standing.leading()
    assert standing.answering() is answering
    standing.tick()
    standing.begin()
    assert stage.roles[-1] == (MasterRole.FOLLOWING, None)
    with pytest.raises(Unavailable):
        standing.answering()
    standing.take([BLOCK])
    standing.elected(12)
    assert standing.leading().epoch == 12


def test_nobody_is_served_before_what_may_be_granted_is_durable(stage: Stage) -> None:
    catalog = stage.catalog = Held()
    standing = stage.standing
    standing.begin()
    standing.elected(9)
    standing.tick()
    assert standing.role is MasterRole.FOLLOWING
    with pytest.raises(Unavailable, match="no master owns the catalog now"):
        standing.leading()
    standing.deposed(OVER)
    assert (standing.role, stage.roles[-1]) == (MasterRole.FOLLOWING, (MasterRole.FOLLOWING, None))
    catalog.commits[0][1](None)
    assert standing.role is MasterRole.FOLLOWING, "it has ended meanwhile"
    standing.elected(12)
    catalog.commits[1][1](None)
    assert standing.leading().epoch == 12


def test_nothing_is_left_of_an_owner_that_was(stage: Stage) -> None:
    standing = stage.standing
    standing.begin()
    standing.elected(9)
    former = weakref.ref(standing.leading())
    gc.freeze()  # as a daemon does once it is ready
    standing.deposed(OVER)
    standing.begin()
    assert former() is None


def test_standing_cut_off_ends_when_most_nodes_left(stage: Stage) -> None:
    standing = stage.standing
    standing.begin()
    standing.elected(9)
    standing.deposed(OVER)
    for stage.linked in (2, 1):
        standing.tick()
        assert standing.role is MasterRole.CUT_OFF, "one of two may have died"
    stage.linked = 0
    standing.tick()
    assert stage.roles[-1] == (MasterRole.FOLLOWING, None)
    assert standing.records() == 0


def test_a_damaged_catalog_is_no_reason_to_stand_by(stage: Stage) -> None:
    with pytest.raises(Corrupt):
        stage.standing.deposed(Corrupt("damaged"))
    stage.standing.deposed(OVER)
    assert stage.roles == []


def test_what_others_own_is_known_by_its_records_with_the_nodes_taken_to_live_that_are_named(stage: Stage) -> None:
    standing = stage.standing
    standing.begin()
    standing.take([BLOCK, put_quota("red", {"pins": 5})])
    standing.owned_by(OTHER)
    assert standing.queries([2]).exists("red", [b"a"]) == b"\0"
    assert standing.queries([1]).exists("red", [b"a", b"b"]) == b"\1\0"
    rows, tenants = standing.columns([1])
    assert DirectoryQueries(rows, tenants).exists("red", [b"a"]) == b"\1"
    assert standing.operator_quotas() == {"red": {"pins": 5}}
    standing.elected(9)
    assert standing.operator_quotas() is None
    assert standing.queries([1]) is standing.leading().directory.queries
    assert standing.columns([1]) == standing.leading().directory.columns()
    standing.close(OVER)


def test_limits_hold_while_the_catalog_is_listed_anew_whoever_owned_it(stage: Stage) -> None:
    standing = stage.standing
    standing.begin()
    standing.take([put_quota("red", {"pins": 5})])
    standing.owned_by(OTHER)
    for _ in range(2):
        known = standing.operator_quotas()
        standing.begin()
        standing.begin()
        standing.take([put_quota("blue", {"pins": 1})])
        assert standing.operator_quotas() == known == {"red": {"pins": 5}}
        standing.take([put_quota("red", {"pins": 5}), delete_quota("blue")])
        standing.owned_by(None)
    standing.elected(9)
    standing.deposed(OVER)
    standing.begin()
    assert standing.operator_quotas() == {"red": {"pins": 5}}, "it had owned it itself"
    standing.owned_by(OTHER)
    assert standing.operator_quotas() == {}, "they have been cleared meanwhile"
