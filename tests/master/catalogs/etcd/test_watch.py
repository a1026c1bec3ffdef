"""Tests of watch.py on a real etcd: every event in order from a revision on, and an error when that ends."""

import uuid
from collections.abc import Callable, Iterator

import grpc
import pytest
from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from kvstore.master.catalogs.etcd import watch as watching
from kvstore.master.catalogs.etcd.channel import EtcdAccess, EtcdChannel
from kvstore.master.catalogs.etcd.lease import end_of
from kvstore.master.catalogs.etcd.watch import ALIVE, CompactedError, EtcdWatch, WatchEvents
from kvstore.protocol.errors import CatalogUnavailable
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background
from tests.etcd_server import EtcdServer

EtcdServerFactory = Callable[..., EtcdServer]


class Watched:
    """Keys of one prefix, and a watch on them."""

    def __init__(self, etcd: EtcdServer) -> None:
        self._etcd = etcd
        self.prefix = uuid.uuid4().bytes + b"/"
        self._channel = EtcdChannel([etcd.host_port], EtcdAccess())
        self.watch = EtcdWatch(self._channel, self.prefix, end_of(self.prefix), timeout_s=60.0)

    def events(self, first_revision: int) -> Iterator[WatchEvents]:
        """Without mere signs of life."""
        return (events for events in self.watch.events(first_revision) if events.events)

    def put(self, name: bytes, value: bytes = b"") -> int:
        with grpc.insecure_channel(self._etcd.host_port) as channel:
            return int(rpc_pb2_grpc.KVStub(channel).Put(rpc_pb2.PutRequest(key=self.prefix + name, value=value)).header.revision)

    def compact(self, revision: int) -> None:
        with grpc.insecure_channel(self._etcd.host_port) as channel:
            rpc_pb2_grpc.KVStub(channel).Compact(rpc_pb2.CompactionRequest(revision=revision))

    def close(self) -> None:
        self.watch.cancel()
        self._channel.close()


@pytest.fixture
def watched(etcd_server_factory: EtcdServerFactory) -> Iterator[Watched]:
    made = Watched(etcd_server_factory())
    yield made
    made.close()


def test_all_that_happened_since_comes_in_order_large_or_not(watched: Watched) -> None:
    first = watched.put(b"0")
    expected = [b"%d" % number for number in range(1, 40)]
    for name in expected:
        watched.put(name, bytes(200_000))
    found: list[bytes] = []
    parts = 0
    for events in watched.events(first + 1):
        found += [event.kv.key.removeprefix(watched.prefix) for event in events.events]
        parts += not events.is_whole
        assert events.revision == first + len(found)
        if len(found) == len(expected):
            break
    assert found == expected
    assert parts > 0, "8 MB come in more messages than one"


def test_what_is_compacted_away_is_told_as_such(watched: Watched) -> None:
    first = watched.put(b"a")
    watched.compact(watched.put(b"a"))
    with pytest.raises(CompactedError):
        next(watched.watch.events(first))


def test_a_watch_that_is_cancelled_ends_with_an_error(watched: Watched) -> None:
    first = watched.put(b"a")
    events = watched.events(first)
    assert next(events).revision == first
    watched.watch.cancel()
    with pytest.raises(CatalogUnavailable):
        next(events)


def test_where_nothing_happens_etcd_is_known_to_live(watched: Watched) -> None:
    events = watched.watch.events(watched.put(b"a") + 1)
    assert in_background(lambda: next(events)).result(PATIENCE_S) == ALIVE


def test_an_etcd_that_hangs_is_given_up(etcd_server_factory: EtcdServerFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PROGRESS_INTERVAL_S", 0.05)
    monkeypatch.setattr(watching, "SILENCE_LIMIT_S", 1.0)
    etcd = etcd_server_factory()
    watched = Watched(etcd)
    first = watched.put(b"a")
    events = watched.events(first)
    assert next(events).revision == first
    etcd.freeze()
    with pytest.raises(CatalogUnavailable):
        next(events)
    etcd.thaw()
    watched.close()
