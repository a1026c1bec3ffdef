"""Tests of leader.py that need no master around it: what its end does. The rest is held by the tests of its services."""

import pytest

from kvstore.master.audit_trail import AuditTrail
from kvstore.master.catalogs.memory import MemoryCatalog
from kvstore.master.config import MasterSettings
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.membership.members import NodeInfo
from kvstore.master.directory.records import NO_DESCRIPTION
from kvstore.master.leadership.leader import LastMaster, LeaderRole
from kvstore.master.server.frames_service import MasterContactInfo
from kvstore.master.server.owner_parts import MasterParts
from kvstore.protocol.errors import InvalidArgument, StaleEpoch, Unavailable
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.tenant_loads import TenantLoads
from kvstore.security.actor import Actor
from kvstore.security.authenticator import Authenticator
from kvstore.security.quotas.limits import QuotasInForce
from tests.master.leadership.held import Held, Place

BY = Actor("operator", "alice")


def make_leader(reactor: Reactor, catalog: MemoryCatalog, partition: int = 0) -> LeaderRole:
    reachable = MasterContactInfo("", "", "", "", 0, partitions=partition + 1)
    trail = AuditTrail(reactor, wall_s=lambda: 0.0)
    master = MasterParts(reactor, MasterSettings(), Authenticator(""), QuotasInForce(""), TenantLoads(), trail)
    return LeaderRole(master, catalog, Place(partition), reachable, epoch=5, followed=FollowedRecords(), wall_ns=10)


def test_after_its_end_nothing_is_written_and_who_waits_is_told() -> None:
    reactor, catalog = Reactor(), Held()
    leader = make_leader(reactor, catalog)
    reply = leader.register(NodeInfo("a", 1), [], LastMaster("", 0), NO_DESCRIPTION)
    with pytest.raises(InvalidArgument, match="alive"):
        leader.forget("a", BY)
    leader.directory.disconnected(reply.node_id, reply.registration_epoch, 0)
    forgotten = leader.forget("a", BY)
    begun = len(catalog.commits)
    leader.end(StaleEpoch("the lease is over"))
    assert isinstance(forgotten.exception(0), Unavailable)
    catalog.commits[-1][1](None)
    leader.run_due()
    assert len(catalog.commits) == begun, "what was durable at last has nothing written after it"
    reactor.close()


def test_forget_completes_when_durable() -> None:
    reactor, catalog = Reactor(), Held()
    leader = make_leader(reactor, catalog)
    reply = leader.register(NodeInfo("a", 1), [], LastMaster("", 0), NO_DESCRIPTION)
    leader.directory.disconnected(reply.node_id, reply.registration_epoch, 0)
    forgotten = leader.forget("a", BY)
    assert not forgotten.done()
    catalog.commits[-1][1](None)
    assert forgotten.done()
    leader.end(StaleEpoch("the lease is over"))
    reactor.close()


def test_node_of_a_later_owner_is_refused() -> None:
    reactor, catalog = Reactor(), Held()
    leader = make_leader(reactor, catalog)
    with pytest.raises(StaleEpoch, match="epoch 5"):
        leader.register(NodeInfo("a", 1), [], LastMaster(catalog.identity, 6), NO_DESCRIPTION)
    assert leader.register(NodeInfo("a", 1), [], LastMaster("another", 6), NO_DESCRIPTION).master_epoch == 5
    reactor.close()


def test_other_partitions_use_the_assigned_node_ids() -> None:
    reactor, catalog = Reactor(), Held()
    first, other = make_leader(reactor, catalog), make_leader(reactor, catalog, partition=1)

    def register(name: str, instance: int, node_id: int, leader: LeaderRole = other) -> int:
        info = NodeInfo(name, instance)
        return leader.register(info, [], LastMaster("", 0), NO_DESCRIPTION, node_id=node_id).node_id

    for leader, node_id in ((first, 3), (other, 0)):
        with pytest.raises(InvalidArgument, match="partition 0 assigns node ids"):
            register("a", 1, node_id, leader)
    assert register("a", 1, 3) == 3
    assert register("a", 1, 4) == 4, "partition 0 knows it anew, under another id"
    assert other.directory.members.get(3) is None
    with pytest.raises(InvalidArgument, match="alive"):
        register("b", 2, 4)
    assert register("a", 1, 5) == 5
    assert register("b", 2, 4) == 4
    assert other.newer(0, 0) == (None, None)
    quotas, retired = first.newer(0, 0)
    assert quotas is not None
    assert retired is not None
    assert first.newer(quotas.version, retired.version) == (None, None)
    reactor.close()
