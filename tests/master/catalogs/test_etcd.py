"""Promises of etcd.py on a real etcd: the conformance suite, fencing, and what outages and late transactions may not do."""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from kvstore.master.catalogs.etcd import EtcdCatalog, cut
from kvstore.master.catalogs.interface import Catalog, Op
from kvstore.protocol.errors import CatalogUnavailable, Closed, ConfigError, StaleEpoch
from kvstore.transfer.testing.waiting import within
from tests.etcd_server import EtcdServer
from tests.master.catalogs.conformance import OPEN_DEADLINE_S, CatalogConformance, MakeCatalog, Outcomes, commit
from tests.master.catalogs.faulty_etcd import FaultyEtcd
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
        """The second takes over, and the first can write no more."""
        rival.open(deadline_s=OPEN_DEADLINE_S)
        for _commit in range(2):
            error = commit(former, Op(b"a", b"2"))
            assert isinstance(error, StaleEpoch)
        assert former.health.startswith("etcd: the catalog is owned by ")
        assert commit(rival, Op(b"b", b"1")) is None
        assert list(rival.load()) == [(b"a", b"1")]


@pytest.fixture
def make() -> Iterator[MakeEtcdCatalog]:
    """Catalogs with short patience, all on one new prefix, closed when the test ends."""
    made: list[EtcdCatalog] = []
    prefix = f"/test-{uuid.uuid4()}"

    def make(host_port: str, *, request_timeout_s: float = 5.0) -> EtcdCatalog:
        made.append(EtcdCatalog([host_port], prefix=prefix, request_timeout_s=request_timeout_s, longest_backoff_s=0.1))
        return made[-1]

    make.prefix = prefix  # type: ignore[attr-defined]
    yield make
    for catalog in made:
        catalog.close()


def kv(etcd: EtcdServer) -> Any:
    return rpc_pb2_grpc.KVStub(grpc.insecure_channel(etcd.host_port))


def test_etcd_down_at_open_is_unavailable_within_the_deadline(make: MakeEtcdCatalog) -> None:
    with within(0.5), pytest.raises(CatalogUnavailable, match="etcd unreachable"):
        make(f"127.0.0.1:{free_ports(1)[0]}").open(deadline_s=0.5)


def test_an_etcd_that_hangs_at_open_is_unavailable_within_the_deadline(
    make: MakeEtcdCatalog, etcd_server_factory: EtcdServerFactory
) -> None:
    server = etcd_server_factory()
    server.freeze()
    with within(0.5), pytest.raises(CatalogUnavailable, match="etcd unreachable"):
        make(server.host_port).open(deadline_s=0.5)


def test_what_waits_while_etcd_is_killed_is_told_in_order_when_it_is_back_and_nothing_acknowledged_is_lost(
    make: MakeEtcdCatalog, etcd_server_factory: EtcdServerFactory
) -> None:
    server, outcomes = etcd_server_factory(), Outcomes()
    catalog = make(server.host_port)
    catalog.open(deadline_s=OPEN_DEADLINE_S)
    records = [(b"%06d" % number, b"%0128d" % number) for number in range(20_000)]
    batches = [records[begin : begin + 200] for begin in range(0, len(records), 200)]
    with WarningLog("etcd unreachable") as said:
        for number, batch in enumerate(batches):
            catalog.commit(list(itertools.starmap(Op, batch)), outcomes.done(number))
            if number == 50:
                server.kill()
        said.wait()
        assert catalog.health.startswith("etcd unreachable: 127.0.0.1:")
    server.start()
    assert [outcomes.next() for _batch in batches] == [(number, None) for number in range(100)]
    assert catalog.health == "ok"
    successor = make(server.host_port)
    successor.open(deadline_s=OPEN_DEADLINE_S)
    assert list(successor.load()) == records


def test_a_transaction_that_lands_after_its_retry_changes_nothing(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    release, landed = threading.Event(), threading.Event()
    thread_of_held: list[int] = []

    def hold_the_second_transaction(method: str) -> None:
        if method == "Txn" and next(transactions) == 1:
            thread_of_held.append(threading.get_ident())
            release.wait(20)

    def notice_the_held_one(_method: str) -> None:
        if release.is_set() and threading.get_ident() in thread_of_held:
            landed.set()

    transactions = itertools.count()
    with FaultyEtcd(etcd) as faulty:
        faulty.on_call, faulty.on_answer = hold_the_second_transaction, notice_the_held_one
        catalog = make(faulty.host_port, request_timeout_s=0.5)
        catalog.open(deadline_s=OPEN_DEADLINE_S)
        assert commit(catalog, Op(b"a", b"held")) is None
        assert len(thread_of_held) == 1
        assert commit(catalog, Op(b"a", None)) is None
        release.set()
        assert landed.wait(20)
    successor = make(etcd.host_port)
    successor.open(deadline_s=OPEN_DEADLINE_S)
    assert list(successor.load()) == []


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED])
def test_whatever_etcd_refuses_commits_wait_and_health_says_why(make: MakeEtcdCatalog, etcd: EtcdServer, code: grpc.StatusCode) -> None:
    outcomes = Outcomes()
    with FaultyEtcd(etcd) as faulty, WarningLog("etcd refuses") as said:
        catalog = make(faulty.host_port)
        catalog.open(deadline_s=OPEN_DEADLINE_S)
        faulty.on_call = lambda method: code
        catalog.commit([Op(b"a", b"1")], outcomes.done())
        said.wait()
        assert code.name in catalog.health
        assert outcomes.empty
        faulty.on_call = lambda method: None
        assert outcomes.next() == (0, None)


def test_a_master_cut_off_while_another_takes_over_finds_itself_fenced(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    outcomes = Outcomes()
    with FaultyEtcd(etcd) as faulty, WarningLog("etcd unreachable") as said:
        former = make(faulty.host_port)
        former.open(deadline_s=OPEN_DEADLINE_S)
        faulty.on_call = lambda method: grpc.StatusCode.UNAVAILABLE
        former.commit([Op(b"a", b"former")], outcomes.done())
        said.wait()
        rival = make(etcd.host_port)
        rival.open(deadline_s=OPEN_DEADLINE_S)
        faulty.on_call = lambda method: None
        assert isinstance(outcomes.next()[1], StaleEpoch)
    assert list(rival.load()) == []


def test_removing_the_owners_key_fences_the_owner(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    catalog = make(etcd.host_port)
    catalog.open(deadline_s=OPEN_DEADLINE_S)
    kv(etcd).DeleteRange(rpc_pb2.DeleteRangeRequest(key=f"{make.prefix}/owner".encode()))  # type: ignore[attr-defined]
    error = commit(catalog, Op(b"a", b"1"))
    assert isinstance(error, StaleEpoch)
    assert "nobody" in str(error)


def test_two_masters_that_open_at_once_are_told_apart(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    """The rival takes over between the reading and the writing of the owner's key; the opening is tried again and wins."""
    rival = make(etcd.host_port)
    epochs: list[int] = []

    def let_the_rival_in(method: str) -> None:
        if method == "Txn" and not epochs:
            epochs.append(rival.open(deadline_s=OPEN_DEADLINE_S))

    with FaultyEtcd(etcd) as faulty:
        faulty.on_call = let_the_rival_in
        assert make(faulty.host_port).open(deadline_s=OPEN_DEADLINE_S) > epochs[0]
    assert isinstance(commit(rival, Op(b"a", b"1")), StaleEpoch)


def test_a_load_whose_state_etcd_compacted_away_ends_with_an_error(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    writer = make(etcd.host_port)
    writer.open(deadline_s=OPEN_DEADLINE_S)
    assert commit(writer, *(Op(b"%04d" % number, b"") for number in range(300))) is None
    catalog = make(etcd.host_port)
    epoch = catalog.open(deadline_s=OPEN_DEADLINE_S)
    loading = catalog.load()
    assert next(loading) == (b"0000", b"")
    assert commit(catalog, Op(b"later", b"")) is None
    kv(etcd).Compact(rpc_pb2.CompactionRequest(revision=epoch + 1))
    with within(OPEN_DEADLINE_S / 2), pytest.raises(CatalogUnavailable, match="compacted"):  # asking again would not help
        list(loading)


def test_a_load_goes_on_after_a_short_outage(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    with FaultyEtcd(etcd) as faulty:
        catalog = make(faulty.host_port)
        catalog.open(deadline_s=OPEN_DEADLINE_S)
        outage = iter([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE])
        faulty.on_call = lambda method: next(outage, None)
        assert list(catalog.load()) == []


def test_a_page_that_proves_larger_than_a_message_may_be_is_read_in_smaller_ones(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    writer = make(etcd.host_port)
    writer.open(deadline_s=OPEN_DEADLINE_S)
    small = [(b"0%04d" % number, b"") for number in range(300)]
    large = [(b"1%04d" % number, b"v" * 65_536) for number in range(1_100)]
    assert commit(writer, *itertools.starmap(Op, small + large)) is None
    catalog = make(etcd.host_port)
    catalog.open(deadline_s=OPEN_DEADLINE_S)
    assert list(catalog.load()) == small + large


def test_an_etcd_that_refuses_for_good_at_open_is_a_config_error_at_once(make: MakeEtcdCatalog, etcd: EtcdServer) -> None:
    with FaultyEtcd(etcd) as faulty:
        faulty.on_call = lambda method: grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(ConfigError, match="PERMISSION_DENIED"):
            make(faulty.host_port).open(deadline_s=60)


def test_close_does_not_wait_for_an_etcd_that_hangs(make: MakeEtcdCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    server, outcomes = etcd_server_factory(), Outcomes()
    catalog = make(server.host_port)
    catalog.open(deadline_s=OPEN_DEADLINE_S)
    server.freeze()
    catalog.commit([Op(b"a", b"1")], outcomes.done())
    with within(0):
        catalog.close()
    assert isinstance(outcomes.next()[1], Closed)


def test_parts_keep_to_the_limits_of_operations_and_bytes_and_lose_nothing() -> None:
    changes = {b"%03d" % number: b"v" * (number % 50) if number % 7 else None for number in range(500)}
    parts = list(cut(changes, max_ops=10, max_bytes=200))
    assert dict(change for part in parts for change in part) == changes
    assert all(len(part) <= 10 and sum(len(key) + len(value or b"") for key, value in part) <= 200 for part in parts)
    assert max(len(part) for part in parts) == 10


def test_a_change_larger_than_a_part_is_a_part_of_its_own_and_no_change_is_no_part() -> None:
    assert [len(part) for part in cut({b"a": b"v" * 300, b"b": b""}, max_ops=10, max_bytes=200)] == [1, 1]
    assert list(cut({}, max_ops=10, max_bytes=200)) == []


def test_etcd_takes_128_operations_and_a_compare_in_one_transaction_but_not_129(etcd: EtcdServer) -> None:
    def transaction(op_count: int) -> Any:
        request = rpc_pb2.TxnRequest()
        request.compare.add(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=b"absent", mod_revision=0)
        for number in range(op_count):
            request.success.add().request_put.key = b"limit/%d" % number
        return request

    assert kv(etcd).Txn(transaction(128)).succeeded
    with pytest.raises(grpc.RpcError, match="too many operations"):
        kv(etcd).Txn(transaction(129))
