"""Promises of leading.py that need no master around it: what its end does. The rest is held by the tests of its services."""

import pytest

from kvstore.master.catalogs.memory import MemoryCatalog
from kvstore.master.config import MasterSettings
from kvstore.master.directory.following import Followed
from kvstore.master.directory.membership import NodeInfo
from kvstore.master.directory.records import NO_DESCRIPTION
from kvstore.master.frames.service import Reachable
from kvstore.master.roles.leading import Leading, MasterSeen
from kvstore.protocol.errors import InvalidArgument, StaleEpoch, Unavailable
from kvstore.protocol.frames import VERSION
from kvstore.rpc.reactor import Reactor
from kvstore.security.guard import Guard
from kvstore.security.quotas.in_force import QuotasInForce
from tests.master.roles.held import Held


def leading(reactor: Reactor, catalog: MemoryCatalog) -> Leading:
    reachable = Reachable("", "", "", "", 0)
    settings, followed = MasterSettings(), Followed()
    return Leading(
        *(reactor, catalog, settings),
        epoch=5,
        followed=followed,
        wall_ns=10,
        reachable=reachable,
        guard=Guard(""),
        quotas=QuotasInForce(""),
    )


def test_after_its_end_nothing_is_written_and_who_waits_is_told() -> None:
    reactor, catalog = Reactor(), Held()
    leader = leading(reactor, catalog)
    reply = leader.register(NodeInfo("a", 1), [], MasterSeen("", 0), NO_DESCRIPTION, VERSION, 0)
    with pytest.raises(InvalidArgument, match="alive"):
        leader.forget("a")
    leader.directory.disconnected(reply.node_id, reply.registration_epoch, 0)
    forgotten = leader.forget("a")
    begun = len(catalog.commits)
    leader.end(StaleEpoch("the lease is over"))
    assert isinstance(forgotten.exception(0), Unavailable)
    catalog.commits[-1][1](None)
    leader.tick()
    assert len(catalog.commits) == begun, "what was durable at last has nothing written after it"
    reactor.close()


def test_who_waits_for_a_node_to_be_forgotten_is_told_when_it_is_durable() -> None:
    reactor, catalog = Reactor(), Held()
    leader = leading(reactor, catalog)
    reply = leader.register(NodeInfo("a", 1), [], MasterSeen("", 0), NO_DESCRIPTION, VERSION, 0)
    leader.directory.disconnected(reply.node_id, reply.registration_epoch, 0)
    forgotten = leader.forget("a")
    assert not forgotten.done()
    catalog.commits[-1][1](None)
    assert forgotten.done()
    leader.end(StaleEpoch("the lease is over"))
    reactor.close()


def test_a_node_that_has_heard_of_a_later_owner_of_the_same_catalog_is_refused() -> None:
    reactor, catalog = Reactor(), Held()
    leader = leading(reactor, catalog)
    with pytest.raises(StaleEpoch, match="epoch 5"):
        leader.register(NodeInfo("a", 1), [], MasterSeen(catalog.identity, 6), NO_DESCRIPTION, VERSION, 0)
    assert leader.register(NodeInfo("a", 1), [], MasterSeen("another", 6), NO_DESCRIPTION, VERSION, 0).master_epoch == 5
    reactor.close()
