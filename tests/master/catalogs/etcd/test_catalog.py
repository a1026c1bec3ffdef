"""Tests of etcd.py on a real etcd: the conformance suite, fencing, and what outages and late transactions may not do."""

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from kvstore.master.catalogs.etcd.catalog import EtcdCatalog, EtcdTiming
from kvstore.master.catalogs.etcd.writer import cut
from kvstore.master.catalogs.interface import BlockDeletes, Catalog, CatalogOwner, Op
from kvstore.protocol.errors import CatalogUnavailable, Closed, ConfigError, StaleEpoch
from kvstore.protocol.partitions import SHARDS
from kvstore.testing.transfer.awaited import eventually, within
from tests.etcd_server import EtcdServer
from tests.master.catalogs.conformance import OPEN_DEADLINE_S, CatalogConformance, MakeCatalog, Outcomes, blocks, commit, elected, opened
from tests.master.catalogs.etcd.faulty_etcd import FaultyEtcd
from tests.master.warning_log import WarningLog
from tests.ports import free_ports

EtcdServerFactory = Callable[..., EtcdServer]
MakeEtcdCatalog = Callable[..., EtcdCatalog]


class TestEtcdCatalog(CatalogConformance):
    @pytest.fixture
    def place(self, etcd: EtcdServer) -> MakeCatalog:
        prefix = f"/test-{uuid.uuid4()}"
        return lambda: EtcdCatalog([etcd.host_port], prefix=prefix)

    def check_rivals(self, former: Catalog, rival: Catalog) -> None:
        """The second follows, and is elected when the first is closed."""
        following = opened(rival, "rival")
        following.await_told("owned by me")
        assert isinstance(commit(rival, Op(b"a", b"3")), StaleEpoch)
        assert commit(former, Op(b"a", b"2"), blocks(b"block"), Op(b"later", b"")) is None
        following.wait(lambda: (b"later" in following.records) and bool(following.blocks))
        assert following.records == {b"a": b"2", b"later": b""}
        assert commit(former, BlockDeletes("red", [b"block"]), Op(b"later", None)) is None
        following.wait(lambda: following.records == {b"a": b"2"} and not following.blocks)
        former.close()
        following.await_elected()
        assert following.told == ["begin", "owned by me", "owned by None", "elected"]
        assert commit(rival, Op(b"a", b"3")) is None


@pytest.fixture
def make() -> Iterator[MakeEtcdCatalog]:
    """Catalogs with short patience, all on one new prefix, closed when the test ends."""
    made: list[EtcdCatalog] = []
    prefix = f"/test-{uuid.uuid4()}"

    def make(host_port: str, *, request_timeout_s: float = 5.0, lease_ttl_s: float = 60.0) -> EtcdCatalog:
        made.append(EtcdCatalog([host_port], prefix=prefix, timing=EtcdTiming(lease_ttl_s, request_timeout_s, longest_backoff_s=0.1)))
        return made[-1]

    make.prefix = prefix  # type: ignore[attr-defined]
    yield make
    for catalog in made:
        catalog.close()


def kv(etcd: EtcdServer) -> Any:
    return rpc_pb2_grpc.KVStub(grpc.insecure_channel(etcd.host_port))


def test_etcd_down_at_open_is_unavailable_within_the_deadline(make: MakeEtcdCatalog) -> None:
    with within(0.5), pytest.raises(CatalogUnavailable, match=r"^etcd does not answer at 127"):
        make(f"127.0.0.1:{free_ports(1)[0]}").open(deadline_s=0.5)


def test_open_raises_unavailable_by_its_deadline_if_etcd_hangs(make: MakeEtcdCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    server = etcd_server_factory()
    server.freeze()
    with within(0.5), pytest.raises(CatalogUnavailable, match=r"^etcd does not answer at 127"):
        make(server.host_port).open(deadline_s=0.5)


def test_queued_commits_survive_an_etcd_restart_in_order(make: MakeEtcdCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    server, outcomes = etcd_server_factory(), Outcomes()
    catalog = make(server.host_port)
    elected(catalog)
    records = [(b"%06d" % number, b"%0128d" % number) for number in range(20_000)]
    batches = [records[begin : begin + 200] for begin in range(0, len(records), 200)]
    with WarningLog("etcd unreachable") as said:
        for number, batch in enumerate(batches):
            catalog.commit(list(map(Op._make, batch)), outcomes.done(number))
            if number == 50:
                server.kill()
        said.wait()
        eventually(lambda: catalog.health.startswith("etcd does not answer at 127.0.0.1:"), "one sentence of the catalog's health")
    server.start()
    assert [outcomes.next() for _batch in batches] == [(number, None) for number in range(100)]
    eventually(lambda: catalog.health == "ok", "health that is well again")
    catalog.close()
    assert elected(make(server.host_port)).records == dict(records)


@pytest.mark.promise("failover")
def test_late_transaction_changes_nothing_after_its_retry(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    is_elected, release, landed = threading.Event(), threading.Event(), threading.Event()
    thread_of_held: list[int] = []

    def hold_the_first_transaction(method: str) -> None:
        if method == "Txn" and is_elected.is_set() and not thread_of_held:
            thread_of_held.append(threading.get_ident())
            release.wait(20)

    def notice_the_held_one(_method: str) -> None:
        if release.is_set() and threading.get_ident() in thread_of_held:
            landed.set()

    with FaultyEtcd(etcd) as faulty:
        faulty.on_call, faulty.on_answer = hold_the_first_transaction, notice_the_held_one
        catalog = make(faulty.host_port, request_timeout_s=0.5)
        elected(catalog)
        assert commit(catalog, Op(b"c", b"there")) is None
        is_elected.set()
        assert commit(catalog, Op(b"a", b"held")) is None
        assert len(thread_of_held) == 1
        assert commit(catalog, Op(b"a", None)) is None
        release.set()
        assert landed.wait(20)
        catalog.close()
    assert elected(make(etcd.host_port)).records == {b"c": b"there"}


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED])
def test_whatever_etcd_refuses_commits_wait_and_health_says_why(make: MakeEtcdCatalog, etcd: EtcdServer, code: grpc.StatusCode) -> None:
    outcomes = Outcomes()
    with FaultyEtcd(etcd) as faulty:
        catalog = make(faulty.host_port)
        elected(catalog)
        faulty.on_call = lambda method: code if method in ("Txn", "Range") else None
        catalog.commit([Op(b"a", b"1")], outcomes.done())
        eventually(lambda: code.name in catalog.health.split("; which masters live")[0], "health that says why")
        assert outcomes.empty
        faulty.on_call = lambda method: None
        assert outcomes.next() == (0, None)


@pytest.mark.promise("failover")
def test_isolated_owner_is_deposed_before_another_is_elected(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    """Its keepalives do not get through, nor does what it writes; once they do, it follows."""
    outcomes = Outcomes()
    with FaultyEtcd(etcd) as faulty:
        former = make(faulty.host_port, lease_ttl_s=1.0)
        was = elected(former, "former")
        epoch = was.epoch
        rival = make(etcd.host_port)
        following = opened(rival, "rival")
        faulty.on_call = lambda method: grpc.StatusCode.UNAVAILABLE
        former.commit([Op(b"a", b"former")], outcomes.done())
        was.await_told("deposed")
        assert isinstance(outcomes.next()[1], StaleEpoch)
        assert isinstance(was.why, StaleEpoch)
        assert following.await_elected() > epoch
        assert commit(rival, Op(b"a", b"rival")) is None
        faulty.on_call = lambda method: None
        was.await_told("owned by rival")
        assert was.told == ["begin", "owned by None", "elected", "deposed", "begin", "owned by rival"]
        assert was.records == {b"a": b"rival"}
        assert isinstance(commit(former, Op(b"a", b"former")), StaleEpoch)
        rival.close()
        assert was.await_elected() > following.epoch


def test_deleting_the_owner_key_deposes_the_owner(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    catalog = make(etcd.host_port)
    following = elected(catalog)
    epoch = following.epoch
    kv(etcd).DeleteRange(rpc_pb2.DeleteRangeRequest(key=f"{make.prefix}/owner".encode()))  # type: ignore[attr-defined]
    error = commit(catalog, Op(b"a", b"1"))
    assert isinstance(error, StaleEpoch)
    assert "no master" in str(error)
    following.await_told("elected", times=2)
    assert following.epoch > epoch
    assert following.records == {}


def test_one_of_several_masters_is_elected_at_a_time(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    catalogs = {name: make(etcd.host_port) for name in ("one", "two", "three")}
    followings = {name: opened(catalog, name) for name, catalog in catalogs.items()}
    epochs: list[int] = []
    while followings:
        eventually(lambda: any(following.epoch for following in followings.values()), "an election")
        [owner] = [name for name, following in followings.items() if following.epoch]
        epochs.append(followings.pop(owner).epoch)
        told = CatalogOwner(owner, f"{owner}:1", epochs[-1])
        for following in followings.values():
            following.wait(lambda following=following, told=told: following.owner == told)  # type: ignore[misc]
        catalogs[owner].close()
    assert epochs == sorted(set(epochs))


def test_follower_lists_again_after_missed_compaction(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    owner = make(etcd.host_port)
    elected(owner)
    with FaultyEtcd(etcd) as faulty, WarningLog("etcd unreachable") as said:
        following = opened(make(faulty.host_port, request_timeout_s=0.5))
        following.await_told("owned by me")
        assert commit(owner, Op(b"a", b"1"), Op(b"gone", b"")) is None
        following.wait(lambda: b"gone" in following.records)
        faulty.on_call = lambda method: grpc.StatusCode.UNAVAILABLE
        faulty.hang_up()
        said.wait()
        assert commit(owner, Op(b"gone", None)) is None
        assert commit(owner, Op(b"c", b"2")) is None
        revision = kv(etcd).Range(rpc_pb2.RangeRequest(key=b"x")).header.revision
        kv(etcd).Compact(rpc_pb2.CompactionRequest(revision=revision))
        faulty.on_call = lambda method: None
        following.await_told("begin", times=2)
        following.wait(lambda: following.records == {b"a": b"1", b"c": b"2"})


def test_missing_its_own_election_makes_a_master_stand_again(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    """Between its listing and its watch etcd compacts the creation of its key away."""
    compacted: list[int] = []

    def compact_once(method: str) -> None:
        if method == "Watch" and not compacted:
            # A write after the creation: a watch from the compacted revision itself would still deliver it.
            compacted.append(kv(etcd).Put(rpc_pb2.PutRequest(key=b"x", value=b"")).header.revision)
            kv(etcd).Compact(rpc_pb2.CompactionRequest(revision=compacted[0]))

    with FaultyEtcd(etcd) as faulty:
        faulty.on_call = compact_once
        catalog = make(faulty.host_port)
        following = elected(catalog)
        assert following.epoch > compacted[0]
        assert following.told.count("begin") == 2
        assert commit(catalog, Op(b"a", b"1")) is None
        catalog.close()


def test_follower_misses_nothing_in_a_short_outage(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    owner = make(etcd.host_port)
    elected(owner)
    with FaultyEtcd(etcd) as faulty, WarningLog("etcd unreachable") as said:
        catalog = make(faulty.host_port)
        following = opened(catalog)
        following.await_told("owned by me")
        faulty.on_call = lambda method: grpc.StatusCode.UNAVAILABLE
        faulty.hang_up()
        said.wait()
        eventually(lambda: catalog.health.startswith("etcd"), "health that tells of it, whoever said it first")
        assert commit(owner, Op(b"a", b"1")) is None
        faulty.on_call = lambda method: None
        following.wait(lambda: following.records == {b"a": b"1"})
        assert following.told == ["begin", "owned by me"]
        eventually(lambda: catalog.health == "ok", "health that is well again")


def test_follower_health_recovers_without_events(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    elected(make(etcd.host_port))
    with FaultyEtcd(etcd) as faulty:
        catalog = make(faulty.host_port)
        following = opened(catalog)
        following.await_told("owned by me")
        faulty.on_call = lambda method: grpc.StatusCode.UNAVAILABLE
        faulty.hang_up()
        eventually(lambda: catalog.health.startswith("etcd"), "health that tells of it")
        faulty.on_call = lambda method: None
        eventually(lambda: catalog.health == "ok", "health that is well again")
        assert following.told == ["begin", "owned by me"]


def test_too_large_page_is_read_in_smaller_ones(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    writer = make(etcd.host_port)
    elected(writer)
    small = [(b"0%04d" % number, b"") for number in range(300)]
    large = [(b"1%04d" % number, b"v" * 65_536) for number in range(1_100)]
    assert commit(writer, *map(Op._make, small + large)) is None
    writer.close()
    assert elected(make(etcd.host_port)).records == dict(small + large)


def test_open_raises_config_error_if_etcd_refuses(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    with FaultyEtcd(etcd) as faulty:
        faulty.on_call = lambda method: grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(ConfigError, match="PERMISSION_DENIED"):
            make(faulty.host_port).open(deadline_s=60)


def test_close_does_not_wait_for_an_etcd_that_hangs(make: MakeEtcdCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    server, outcomes = etcd_server_factory(), Outcomes()
    catalog = make(server.host_port)
    elected(catalog)
    server.freeze()
    catalog.commit([Op(b"a", b"1")], outcomes.done())
    with within(0):
        catalog.close()
    assert isinstance(outcomes.next()[1], Closed)


def test_cut_keeps_to_operation_and_byte_limits() -> None:
    changes = {b"%03d" % number: b"v" * (number % 50) if number % 7 else None for number in range(500)}
    parts = list(cut(changes, max_ops=10, max_bytes=200))
    assert dict(change for part in parts for change in part) == changes
    assert all(len(part) <= 10 and sum(len(key) + len(value or b"") for key, value in part) <= 200 for part in parts)
    assert max(len(part) for part in parts) == 10


def test_cut_gives_a_large_change_its_own_part() -> None:
    assert [len(part) for part in cut({b"a": b"v" * 300, b"b": b""}, max_ops=10, max_bytes=200)] == [1, 1]
    assert list(cut({}, max_ops=10, max_bytes=200)) == []


def test_into_how_many_shards_blocks_are_cut_is_the_catalogs_own(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    made = make(etcd.host_port)
    made.open(deadline_s=OPEN_DEADLINE_S)
    assert made.shards == SHARDS
    form = b'{"version": 1, "shards": 7, "partitions": 1}'
    kv(etcd).Put(rpc_pb2.PutRequest(key=f"{make.prefix}/format".encode(), value=form))  # type: ignore[attr-defined]
    other = make(etcd.host_port)
    other.open(deadline_s=OPEN_DEADLINE_S)
    assert other.shards == 7


@pytest.mark.parametrize(
    "form",
    [
        b'{"version": 2, "shards": 64, "partitions": 1}',
        b'{"version": 1, "shards": 0, "partitions": 1}',
        b'{"version": 1}',
        b"no form",
    ],
)
def test_a_catalog_of_another_release_is_refused_not_guessed_at(make: MakeEtcdCatalog, etcd: EtcdServer, form: bytes) -> None:
    kv(etcd).Put(rpc_pb2.PutRequest(key=f"{make.prefix}/format".encode(), value=form))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="another release"):
        make(etcd.host_port).open(deadline_s=OPEN_DEADLINE_S)
