"""Tests of members.py, on a real etcd: who lives is known to all, and who ends or is not heard of is gone."""

import contextlib
import uuid
from collections.abc import Callable, Iterator

import grpc
import pytest
from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel
from kvstore.master.catalogs.etcd.members import EtcdMembers
from kvstore.master.catalogs.interface import Candidate, MasterContact, PeerMaster
from kvstore.testing.transfer.awaited import eventually
from tests.etcd_server import EtcdServer
from tests.master.catalogs.etcd.breaking_channel import BreakingChannel
from tests.master.catalogs.etcd.faulty_etcd import FaultyEtcd

MakeMember = Callable[[str], EtcdMembers]


@pytest.fixture
def member(etcd: EtcdServer) -> Iterator[MakeMember]:
    prefix, made, channels = f"/test-{uuid.uuid4()}", list[EtcdMembers](), list[BreakingChannel]()

    def member(address: str) -> EtcdMembers:
        channels.append(BreakingChannel([etcd.host_port], EtcdAccess()))
        contact = MasterContact(f"control of {address}", f"key of {address}")
        made.append(EtcdMembers(channels[-1], prefix, Candidate("name", address), contact, lease_ttl_s=2.0, timeout_s=30.0))
        made[-1].start()
        return made[-1]

    yield member
    for one in made:
        one.stop()
    for channel in channels:
        channel.close()


def test_all_know_who_lives_and_who_has_ended_is_gone_at_once(member: MakeMember) -> None:
    first, second = member("a:1"), member("b:1")
    eventually(lambda: first.live_masters == second.live_masters == {"a:1", "b:1"}, "both know both")
    second.stop()
    eventually(lambda: first.live_masters == {"a:1"}, "the one that has ended is gone")


def test_members_have_the_contacts_of_other_masters(member: MakeMember) -> None:
    first, second = member("a:1"), member("b:1")
    expected = {"b:1": PeerMaster("name", MasterContact("control of b:1", "key of b:1"))}
    eventually(lambda: first.peer_masters == expected, "the first knows the second, and not itself")
    request = rpc_pb2.TxnRequest()
    put = request.success.add().request_put
    put.key, put.value = first._prefix + b"c:1", b"of a release before"
    first._channel.call("Txn", request, timeout_s=30.0)
    eventually(
        lambda: first.peer_masters == {**expected, "c:1": PeerMaster("of a release before", MasterContact())},
        "the third is known by its name",
    )
    second.stop()
    eventually(lambda: "b:1" not in first.peer_masters, "the one that has ended is gone")


def test_who_is_not_heard_of_lives_no_more_and_again_when_it_is(member: MakeMember) -> None:
    first, second = member("a:1"), member("b:1")
    eventually(lambda: first.live_masters == {"a:1", "b:1"}, "both live")
    eventually(lambda: second._lease is not None, "it knows that its key is there")
    lease = second._lease
    assert lease is not None
    lease.close()
    eventually(lambda: second._lease is not lease, "another lease")
    eventually(lambda: first.live_masters == {"a:1", "b:1"}, "both live")


def test_who_finds_no_thread_for_a_call_goes_on_looking(member: MakeMember) -> None:
    one = member("a:1")
    eventually(lambda: one.live_masters == {"a:1"}, "it lives")
    assert isinstance(one._channel, BreakingChannel)
    one._channel.is_broken = True
    eventually(lambda: one.live_masters == frozenset(), "who lives is not known")
    eventually(lambda: str(one.health).startswith("the live masters are unknown: "), "its health says so")
    one._channel.is_broken = False
    eventually(lambda: one.live_masters == {"a:1"}, "it lives")
    eventually(lambda: one.health is None, "its health is well again")


def test_who_could_not_write_its_key_lives_once_it_can(etcd: EtcdServer) -> None:
    refused: list[str] = []

    def refuse_once(method: str) -> grpc.StatusCode | None:
        if method != "Txn" or refused:
            return None
        refused.append(method)
        return grpc.StatusCode.UNAVAILABLE

    with FaultyEtcd(etcd) as faulty, contextlib.closing(EtcdChannel([faulty.host_port], EtcdAccess())) as channel:
        faulty.on_call = refuse_once
        one = EtcdMembers(channel, f"/test-{uuid.uuid4()}", Candidate("name", "a:1"), MasterContact(), lease_ttl_s=2.0, timeout_s=30.0)
        one.start()
        eventually(lambda: one.live_masters == {"a:1"}, "it lives")
        one.stop()
    assert refused
