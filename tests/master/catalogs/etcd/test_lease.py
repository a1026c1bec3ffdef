"""Tests of lease.py on a real etcd: a lease ends here before it ends in etcd, after any stop of the process or
network."""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel, ReplyStream
from kvstore.master.catalogs.etcd.lease import EtcdLease
from kvstore.protocol.errors import CatalogUnavailable, StaleEpoch
from kvstore.testing.transfer.awaited import eventually
from tests.etcd_server import EtcdServer
from tests.master.catalogs.etcd.breaking_channel import BreakingChannel
from tests.master.catalogs.etcd.faulty_etcd import FaultyEtcd


class Clock:
    """The monotonic clock, and by how much it has jumped: a process that was stopped sees it jump."""

    def __init__(self) -> None:
        self.jumped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.jumped_s


MakeLease = Callable[..., EtcdLease]


@pytest.fixture
def lost() -> list[StaleEpoch]:
    """Errors passed to `on_lost`."""
    return []


@pytest.fixture
def make(lost: list[StaleEpoch]) -> Iterator[MakeLease]:
    made: list[tuple[EtcdChannel, EtcdLease]] = []

    def make(host_port: str, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> EtcdLease:
        channel = EtcdChannel([host_port], EtcdAccess())
        made.append((channel, EtcdLease(channel, ttl_s, on_lost=lost.append, clock=clock)))
        return made[-1][1]

    yield make
    for channel, lease in made:
        lease.close()
        channel.close()


def stub(etcd: EtcdServer, kind: str) -> Any:
    return getattr(rpc_pb2_grpc, f"{kind}Stub")(grpc.insecure_channel(etcd.host_port))


def held_key(etcd: EtcdServer, lease: EtcdLease) -> Callable[[], bool]:
    """A key under the lease; whether it is there."""
    key = uuid.uuid4().bytes
    kv = stub(etcd, "KV")
    kv.Put(rpc_pb2.PutRequest(key=key, lease=lease.lease_id))
    return lambda: bool(kv.Range(rpc_pb2.RangeRequest(key=key)).kvs)


def test_lease_is_renewed_until_closed_and_then_revoked(etcd: EtcdServer, make: MakeLease, lost: list[StaleEpoch]) -> None:
    renewals: list[str] = []
    with FaultyEtcd(etcd) as faulty:
        faulty.on_call = lambda method: renewals.append(method) if method == "LeaseKeepAlive" else None
        lease = make(faulty.host_port, 4.0)
        is_held = held_key(etcd, lease)
        eventually(lambda: len(renewals) >= 5, "renewals for longer than etcd would have kept it")
        assert lease.is_valid
        assert is_held()
        lease.close()
        assert not is_held()
        assert not lease.is_valid
    assert lost == []


@pytest.mark.promise("failover")
def test_lease_is_invalid_after_a_long_process_stop(etcd: EtcdServer, make: MakeLease, lost: list[StaleEpoch]) -> None:
    clock = Clock()
    lease = make(etcd.host_port, 60.0, clock)
    is_held = held_key(etcd, lease)
    assert lease.is_valid
    clock.jumped_s = 61.0
    assert not lease.is_valid, "at once, before any thread has looked"
    assert is_held(), "and before etcd ends it"


@pytest.mark.promise("failover")
def test_what_is_not_answered_is_lost_here_before_etcd_ends_it(etcd: EtcdServer, make: MakeLease, lost: list[StaleEpoch]) -> None:
    with FaultyEtcd(etcd) as faulty:
        lease = make(faulty.host_port, 0.5)
        is_held = held_key(etcd, lease)
        faulty.on_call = lambda method: grpc.StatusCode.UNAVAILABLE
        eventually(lambda: bool(lost), "that it is lost")
        assert is_held(), "etcd grants no less than two seconds"
        assert not lease.is_valid
        assert "could not be kept: etcd unreachable" in str(lost[0])
        faulty.on_call = lambda method: None
    eventually(lambda: not is_held(), "that etcd has ended it")
    assert len(lost) == 1


def test_lease_time_counts_from_sending_the_renewal(etcd: EtcdServer, make: MakeLease, lost: list[StaleEpoch]) -> None:
    clock = Clock()
    renewals: list[str] = []

    def answer_the_first_one_slowly(method: str) -> grpc.StatusCode | None:
        if method != "LeaseKeepAlive":
            return None
        renewals.append(method)
        clock.jumped_s += 2.5 if len(renewals) == 1 else 0.0
        return None if len(renewals) == 1 else grpc.StatusCode.UNAVAILABLE

    with FaultyEtcd(etcd) as faulty:
        faulty.on_call = answer_the_first_one_slowly
        lease = make(faulty.host_port, 3.0, clock)
        eventually(lambda: len(renewals) > 1 or bool(lost), "that the first answer was heard")
        clock.jumped_s += 1.0
        assert not lease.is_valid, "its three seconds are over by 2.5 and 1"


def test_one_renewal_that_fails_is_tried_again(etcd: EtcdServer, make: MakeLease, lost: list[StaleEpoch]) -> None:
    outcomes: list[grpc.StatusCode | None] = [grpc.StatusCode.UNAVAILABLE, None, None, None]

    def refuse(method: str) -> grpc.StatusCode | None:
        return outcomes.pop(0) if method == "LeaseKeepAlive" and outcomes else None

    with FaultyEtcd(etcd) as faulty:
        faulty.on_call = refuse
        lease = make(faulty.host_port, 10.0)
        eventually(lambda: not outcomes, "renewals")
        assert lease.is_valid
    assert lost == []


def test_unanswered_renewal_is_retried_while_time_is_left(
    etcd: EtcdServer, lost: list[StaleEpoch], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    begun_s: list[float] = []

    class Waiting(threading.Event):
        """Time passes for who waits, and in no other way."""

        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now_s
            now_s += timeout or 0.0
            return self.is_set()

    class Silent(EtcdChannel):
        def stream(self, method: str, requests: Iterator[Any], *, connect_timeout_s: float, timeout_s: float | None = None) -> ReplyStream:
            nonlocal now_s
            begun_s.append(now_s)
            if len(begun_s) == 1:
                now_s += timeout_s or 0.0
                raise CatalogUnavailable("etcd unreachable: deadline exceeded")
            return super().stream(method, requests, connect_timeout_s=60.0)

    threads = SimpleNamespace(Event=Waiting, Thread=threading.Thread, current_thread=threading.current_thread)
    monkeypatch.setattr("kvstore.master.catalogs.etcd.lease.threading", threads)
    with contextlib.closing(Silent([etcd.host_port], EtcdAccess())) as channel:
        with contextlib.closing(EtcdLease(channel, 60.0, on_lost=lost.append, clock=lambda: now_s)):
            eventually(lambda: len(begun_s) > 2 or bool(lost), "a renewal that was answered")
    assert lost == []
    assert begun_s[:3] == pytest.approx([20.0, 46.0, 66.0])


def test_lease_is_lost_and_reported_without_threads(etcd: EtcdServer, lost: list[StaleEpoch]) -> None:
    channel = BreakingChannel([etcd.host_port], EtcdAccess())
    with contextlib.closing(channel), contextlib.closing(EtcdLease(channel, 1.0, on_lost=lost.append)) as lease:
        channel.is_broken = True
        eventually(lambda: bool(lost), "that it is lost")
        assert not lease.is_valid
    assert "can't start new thread" in str(lost[0])


def test_a_lease_that_was_revoked_is_lost_at_the_next_renewal(etcd: EtcdServer, make: MakeLease, lost: list[StaleEpoch]) -> None:
    lease = make(etcd.host_port, 1.0)
    stub(etcd, "Lease").LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease.lease_id))
    eventually(lambda: bool(lost), "that it is lost")
    assert "is over" in str(lost[0])
    lease.close()
    assert len(lost) == 1


def test_it_may_be_closed_by_who_is_told_that_it_is_lost(etcd: EtcdServer) -> None:
    channel, told = EtcdChannel([etcd.host_port], EtcdAccess()), list[StaleEpoch]()

    def on_lost(why: StaleEpoch) -> None:
        lease.close()
        told.append(why)

    lease = EtcdLease(channel, 1.0, on_lost=on_lost)
    stub(etcd, "Lease").LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease.lease_id))
    eventually(lambda: bool(told), "that it is lost")
    channel.close()


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_the_hosts_clock_may_be_set_as_it_likes(
    etcd: EtcdServer, lost: list[StaleEpoch], set_by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set forward it ends no lease, and set back it prolongs none."""
    real, set_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + set_s)
    spec = find_spec(EtcdLease.__module__)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)  # one that has met this clock from the beginning
    spec.loader.exec_module(found)
    with FaultyEtcd(etcd) as faulty, contextlib.closing(EtcdChannel([faulty.host_port], EtcdAccess())) as channel:
        with contextlib.closing(found.EtcdLease(channel, 5.0, on_lost=lost.append)) as lease:
            set_s = set_by_s
            assert lease.is_valid
            faulty.on_call = lambda method: grpc.StatusCode.UNAVAILABLE
            eventually(lambda: bool(lost), "an owner that counts itself out")
            assert not lease.is_valid
