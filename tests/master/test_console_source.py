"""Tests of console_source.py: the cluster as a master's console shows it, and its actions. On real clusters:
tests/system/test_consoles.py."""

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.console.source import MasterView
from kvstore.master.catalogs.interface import MasterContact, PeerMaster
from kvstore.master.console_source import ELECTION_POLL_S, REST_S, MasterConsoleSource
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument, NoOwner, Unavailable
from kvstore.security.actor import CONSOLE, Actor
from kvstore.testing.transfer.awaited import eventually
from tests.master.running import Places, master_in_thread
from tests.ports import free_ports

PARTITIONS = 2

AUDITED = [
    *(("quota_set", "done"), ("quota_clear", "done")),
    *[("pin", "done"), ("remove", "done")] * PARTITIONS,  # each partition's owner records its own part
    *(("drain", "failed"), ("forget", "failed")),
]
BY = Actor("operator", "alice", peer="10.0.0.7", via=CONSOLE)


def watched(places: Places) -> MasterConsoleSource:
    """The source of the master's console."""
    assert places.master is not None
    assert places.master._watch is not None
    source = places.master._watch.source
    assert isinstance(source, MasterConsoleSource)
    return source


def owned(places: Places) -> int:
    assert places.master is not None
    return sum(partition.role_manager.role == "owner" for partition in places.master.partitions)


def owners(places: Places) -> set[str]:
    """Of the partitions, as it knows them."""
    return {owner.address for owner in watched(places).snapshot().status.owners}


def lead_to(source: MasterConsoleSource, contact: MasterContact) -> None:
    """Calls to all known peer masters go there from now on."""
    known = {address: PeerMaster(peer_master.name, contact) for address, peer_master in source._peer_masters.known().items()}
    source._peer_masters.known = lambda: known


@pytest.fixture
def pair(tmp_path: Path, etcd_url: str) -> Iterator[tuple[Places, Places]]:
    """Two masters that own a partition each."""
    catalog = f"{etcd_url}/{uuid.uuid4()}"
    with ExitStack() as stack:
        found = [
            stack.enter_context(
                master_in_thread(
                    tmp_path / str(index),
                    listen=f"127.0.0.1:{free_ports(1)[0]}",
                    catalog=catalog,
                    partitions=PARTITIONS,
                    share_settle_s=0.1,
                    lease_ttl_s=10.0,
                )
            )
            for index in range(2)
        ]
        eventually(lambda: [owned(places) for places in found] == [1, 1], "each has its share")
        addresses = {places.listen for places in found}
        for places in found:
            eventually(lambda places=places: owners(places) == addresses, "each knows the other's share")  # type: ignore[misc]
        yield found[0], found[1]


def test_a_master_that_is_alone_asks_nobody_and_never_rests(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as places:
        source = watched(places)
        status, missing, _age_s = source.snapshot()
        assert (status.role, missing, source.rest_s()) == ("owner", (), 0.0)
        assert source.masters() == [MasterView(places.listen, status.name, "owner")]


@pytest.mark.promise("observable")
def test_each_tells_of_all_partitions_and_of_all_masters(pair: tuple[Places, Places]) -> None:
    addresses = {places.listen for places in pair}
    for places in pair:
        source = watched(places)
        eventually(lambda source=source: not source.snapshot().missing, "it hears the other one")  # type: ignore[misc]
        status = source.snapshot().status
        assert (status.role, {owner.address for owner in status.owners}) == ("owner", addresses)
        assert source.rest_s() == REST_S
        assert {(one.address, one.role, one.error) for one in source.masters()} == {(address, "owner", "") for address in addresses}
        assert source.topologies() == []
        assert source.contents(pb.ContentsRequest()) == pb.ContentsReply()


def test_each_does_what_an_operator_says_at_whoever_owns_it(pair: tuple[Places, Places]) -> None:
    for number, places in enumerate(pair):
        source, tenant = watched(places), f"red-{number}"
        source.set_quota(tenant, {"pins": 3, "blocks": None}, BY)
        for other in pair:
            eventually(lambda: tenant in watched(other).snapshot().status.quotas.tenants, "both tell of it")  # noqa: B023
        source.clear_quota(tenant, ["pins", "blocks"], BY)
        eventually(lambda: tenant not in source.snapshot().status.quota_origins, "and of its end")  # noqa: B023
        assert source.pin(tenant, "ns", BY, pinned=True) == source.remove(tenant, "ns", BY) == 0
        with pytest.raises(InvalidArgument, match="there is no node 'n0'"):
            source.drain("n0", BY, to="peers", cancel=False)
        with pytest.raises(InvalidArgument, match="there is no node 'n0'"):
            source.forget("n0", BY)
        for other in pair:  # a master that owns no part of an action knows of it by the catalog
            eventually(lambda: len(audited(watched(other))) == (number + 1) * len(AUDITED), "both know all entries")  # noqa: B023
    assert Counter((entry.action, entry.result) for entry in audited(watched(pair[0]))) == Counter(AUDITED * 2)
    assert {(entry.kind, entry.peer, entry.via) for entry in audited(watched(pair[0]))} == {(BY.kind, BY.peer, BY.via)}


def audited(source: MasterConsoleSource) -> list[pb.AuditEntry]:
    """Entries of this test's operator, as this master has them."""
    return [entry for entry in source.audit(0) if entry.actor == BY.name]


def test_action_waits_for_an_election(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with master_in_thread(tmp_path) as places:
        source = watched(places)
        role_manager = source._role_managers[0]
        waits = list[float]()

        def elected_meanwhile(seconds: float) -> None:
            waits.append(seconds)
            role_manager._is_open = len(waits) > 1

        with monkeypatch.context() as patched:
            patched.setattr("kvstore.master.console_source.time.sleep", elected_meanwhile)
            role_manager._is_open = False
            assert source.pin("red", "ns", BY, pinned=True) == 0
            assert waits == [ELECTION_POLL_S] * 2
        source._action_timeout_s = 0.0
        role_manager._is_open = False
        with pytest.raises(NoOwner, match="no master owns the catalog now"):
            source.pin("red", "ns", BY, pinned=True)
        role_manager._is_open = True


class ChangingHands:
    """A partition's owner at each look-up ("" for none), and the calls, which the former owner refuses."""

    def __init__(self, source: MasterConsoleSource, *owners: str) -> None:
        self._owners = list(owners)
        self.calls: list[tuple[str, str]] = []
        source._owner_elsewhere = self.known  # type: ignore[assignment, method-assign]
        source._peer_masters.call = self.call  # type: ignore[assignment, method-assign]

    def known(self, _partition: int) -> str:
        owner = self._owners.pop(0) if len(self._owners) > 1 else self._owners[0]
        if not owner:
            raise NoOwner("no master owns it")
        return owner

    def call(self, address: str, method: str, _request: object, **_how: object) -> object:
        self.calls.append((address, method))
        if method == "Status" and address == "before":
            return pb.StatusReply(role="following")
        if method == "Status":
            return pb.StatusReply(role="owner", nodes=[pb.NodeStatus(name="n0")])
        if address == "before":
            raise Unavailable("this master stands by")
        return pb.PinNamespaceReply(blocks=3)


def test_action_at_a_former_owner_goes_to_the_next(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as places:
        source = watched(places)
        for between in ((), ("",), ("", "", "")):
            changing = ChangingHands(source, "before", *between, "next")
            assert source.pin("red", "ns", BY, pinned=True) == 3
            assert changing.calls == [("before", "PinNamespace"), ("next", "PinNamespace")]
        stays = ChangingHands(source, "before")
        with pytest.raises(Unavailable, match="stands by"):
            source.pin("red", "ns", BY, pinned=True)
        assert stays.calls == [("before", "PinNamespace")], "of one that refuses and stays the owner nothing more is asked"
        source._role_managers = [*source._role_managers] * PARTITIONS
        drained = ChangingHands(source, "before", "next")
        source.drain("n0", BY, to="peers", cancel=False)
        assert drained.calls == [("before", "Status"), ("next", "Status"), ("next", "Drain"), ("next", "Drain")], (
            "who follows knows no nodes"
        )


@pytest.mark.promise("observable")
def test_silent_master_is_named_and_its_last_status_kept(pair: tuple[Places, Places]) -> None:
    second = next(places for places in pair if places.master is not None and places.master.partitions[0].role_manager.role != "owner")
    first = next(places for places in pair if places is not second)
    source = watched(second)
    eventually(lambda: not source.snapshot().missing, "it hears the other one")
    before = source.snapshot().status
    source._last_status[0][1].nodes.add(name="n", state="alive", heartbeat_age_s=1.0)
    lead_to(source, MasterContact("127.0.0.1:1", ""))
    status, [missing], age_s = source.snapshot()
    assert f"at {first.listen}, which owns 1 of the 2 partitions, does not answer: " in missing
    assert "; its data shown are 0 s old" in missing
    assert age_s > 0
    assert [node.heartbeat_age_s > 1.0 for node in status.nodes] == [True], "which goes on"
    assert (status.name, status.role, status.owner.address) == (before.name, "following", first.listen)
    [seen] = [one for one in source.masters() if one.address == first.listen]
    assert (seen.role, bool(seen.error)) == ("owner", True)
    with pytest.raises(Unavailable):
        source.topologies()


def test_of_a_fellow_that_never_answered_nothing_is_shown(pair: tuple[Places, Places]) -> None:
    for places in pair:
        source = watched(places)
        eventually(lambda source=source: source._peer_masters.known(), "it knows the other one")  # type: ignore[misc]
        source._last_status.clear()
        lead_to(source, MasterContact())
        [missing] = source.snapshot().missing
        assert missing.endswith("its entry is damaged; not all is shown")
