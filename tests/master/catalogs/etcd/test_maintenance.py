"""Tests of maintenance.py on real etcd: history stays short, and the catalog's health reports problems before etcd
stops."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from kvstore.master.catalogs.etcd import follower as following
from kvstore.master.catalogs.etcd.catalog import EtcdCatalog, EtcdTiming
from kvstore.master.catalogs.etcd.channel import EtcdAccess
from kvstore.master.catalogs.etcd.maintenance import CORRUPT, NO_SPACE, EtcdMaintenance, MaintenanceLimits, problem_of
from kvstore.master.catalogs.etcd.quorum import EtcdQuorum
from kvstore.master.catalogs.interface import Candidate, Op
from kvstore.testing.transfer.awaited import eventually
from tests.etcd_server import EtcdServer
from tests.master.catalogs.conformance import Outcomes, blocks, commit, elected, opened
from tests.master.catalogs.etcd.breaking_channel import BreakingChannel
from tests.master.catalogs.etcd.faulty_etcd import FaultyEtcd
from tests.master.catalogs.following import Following

EtcdServerFactory = Callable[..., EtcdServer]
MakeCatalog = Callable[..., EtcdCatalog]
SMALL_QUOTA_BYTES = 16 * 1024 * 1024


@pytest.fixture
def make() -> Iterator[MakeCatalog]:
    made: list[EtcdCatalog] = []
    prefix = f"/test-{uuid.uuid4()}"

    def make(host_port: str, bounds: MaintenanceLimits) -> EtcdCatalog:
        made.append(EtcdCatalog([host_port], prefix=prefix, timing=EtcdTiming(60.0, longest_backoff_s=0.1), bounds=bounds))
        return made[-1]

    yield make
    for catalog in made:
        catalog.close()


def revision_is_there(etcd: EtcdServer, revision: int) -> bool:
    with grpc.insecure_channel(etcd.host_port) as channel:
        try:
            rpc_pb2_grpc.KVStub(channel).Range(rpc_pb2.RangeRequest(key=b"x", revision=revision))
        except grpc.RpcError:
            return False
        return True


def newest(etcd: EtcdServer) -> int:
    with grpc.insecure_channel(etcd.host_port) as channel:
        return int(rpc_pb2_grpc.KVStub(channel).Range(rpc_pb2.RangeRequest(key=b"x")).header.revision)


def under(etcd: EtcdServer, part: bytes) -> list[Any]:
    """Operations with this text in their key."""
    with grpc.insecure_channel(etcd.host_port) as channel:
        found = rpc_pb2_grpc.KVStub(channel).Range(rpc_pb2.RangeRequest(key=b"/", range_end=b"0"))
        return [value for value in found.kvs if part in value.key]


def test_owner_compacts_history_and_keeps_an_interval(make: MakeCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    etcd = etcd_server_factory()
    bounds = MaintenanceLimits(compact_interval_s=1.0)  # a follower that a loaded machine delays for longer lists again, and may
    catalog = make(etcd.host_port, bounds)
    first = elected(catalog).epoch
    followed = opened(make(etcd.host_port, bounds), "other")
    assert commit(catalog, Op(b"a", b"0")) is None
    eventually(lambda: not revision_is_there(etcd, first), "that what the election found is compacted away")
    assert commit(catalog, Op(b"a", b"1")) is None
    followed.wait(lambda: followed.records == {b"a": b"1"})
    assert catalog.health == "ok"
    assert followed.told == ["begin", "owned by me"], "what it had been told already is what was compacted"


class InTwoGoes(Following):
    """Stops at the first value of each of its first two listings, until `hold` is set."""

    def begin(self) -> None:
        super().begin()
        if self.told.count("begin") <= 2:
            self.hold.clear()


@pytest.mark.promise("records-durable")
def test_long_listing_keeps_its_history_and_completes(
    make: MakeCatalog, etcd_server_factory: EtcdServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MAX_PAGE_KEYS", following.MIN_PAGE_KEYS)
    etcd, asked, listed = etcd_server_factory(), list[str](), InTwoGoes()
    with FaultyEtcd(etcd) as faulty:
        faulty.on_answer = asked.append
        owner = make(faulty.host_port, MaintenanceLimits(compact_interval_s=0.05))
        elected(owner)
        records = {b"%03d" % number: b"" for number in range(100)}
        assert commit(owner, *map(Op._make, records.items())) is None
        slow = make(etcd.host_port, MaintenanceLimits())
        slow.open(deadline_s=60.0)
        slow.follow(Candidate("slow", "slow:1"), listed)
        listed.await_told("begin")
        assert commit(owner, Op(b"000", b"1")) is None
        seen = newest(etcd)
        assert commit(owner, Op(b"000", b"2")) is None
        eventually(lambda: not revision_is_there(etcd, seen - 1), "that what is listed is compacted away")
        listed.hold.set()
        listed.await_told("begin", times=2)
        [listing] = under(etcd, b".listing/")
        assert commit(owner, Op(b"000", b"3")) is None
        looks = asked.count("Status")
        eventually(lambda: asked.count("Status") > looks + 5, "several looks at etcd")
        assert revision_is_there(etcd, listing.mod_revision)
        listed.hold.set()
        listed.wait(lambda: listed.records == {**records, b"000": b"3"})
        assert listed.told == ["begin", "begin", "owned by me"]
        eventually(lambda: not under(etcd, b".listing/"), "that the history is let go")
        assert commit(owner, Op(b"000", b"4")) is None
        eventually(lambda: not revision_is_there(etcd, listing.mod_revision), "that it is compacted away")
        owner.close()


@pytest.mark.promise("records-durable")
def test_listing_keeps_no_history_when_etcd_is_nearly_full(make: MakeCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    etcd = etcd_server_factory()
    catalog = make(etcd.host_port, MaintenanceLimits(compact_interval_s=3600.0, quota_bytes=100_000))
    first = elected(catalog).epoch
    with grpc.insecure_channel(etcd.host_port) as channel:
        rpc_pb2_grpc.KVStub(channel).Put(rpc_pb2.PutRequest(key=catalog._listing + b"slow:1"))
    assert commit(catalog, *(Op(b"%d" % number, bytes(60_000)) for number in range(3))) is None
    eventually(lambda: not revision_is_there(etcd, first), "that history is compacted away")


def test_history_is_compacted_early_at_half_of_the_quota(make: MakeCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    etcd = etcd_server_factory()
    catalog = make(etcd.host_port, MaintenanceLimits(compact_interval_s=3600.0, quota_bytes=100_000))
    first = elected(catalog).epoch
    assert commit(catalog, *(Op(b"%d" % number, bytes(60_000)) for number in range(3))) is None
    eventually(lambda: not revision_is_there(etcd, first), "that history is compacted away")


def test_without_an_interval_history_is_left_alone(make: MakeCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    etcd, asked = etcd_server_factory(), list[str]()
    with FaultyEtcd(etcd) as faulty:
        faulty.on_answer = asked.append
        elected(make(faulty.host_port, MaintenanceLimits(compact_interval_s=0.0)))
        eventually(lambda: asked.count("Alarm") >= 2, "two looks at etcd")
    assert "Compact" not in asked


def test_foreign_compaction_is_ignored_but_refusal_reported(make: MakeCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    refusals = iter([grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.OUT_OF_RANGE])
    refusing = [False]

    def refuse(method: str) -> grpc.StatusCode | None:
        if method != "Compact":
            return None
        return grpc.StatusCode.PERMISSION_DENIED if refusing[0] else next(refusals, None)

    with FaultyEtcd(etcd_server_factory()) as faulty:
        faulty.on_call = refuse
        catalog = make(faulty.host_port, MaintenanceLimits(compact_interval_s=0.05))
        elected(catalog)
        eventually(lambda: next(refusals, None) is None, "two refused compactions")
        assert "PERMISSION_DENIED" not in catalog.health
        refusing[0] = True
        eventually(lambda: "PERMISSION_DENIED" in catalog.health, "health that says why")
        refusing[0] = False
        eventually(lambda: catalog.health == "ok", "health that is well again")


def test_who_finds_no_thread_for_a_call_goes_on_looking(etcd: EtcdServer) -> None:
    with contextlib.closing(BreakingChannel([etcd.host_port], EtcdAccess())) as channel:
        channel.is_broken = True
        quorum, bounds = EtcdQuorum([etcd.host_port], EtcdAccess()), MaintenanceLimits(compact_interval_s=0.05)
        keeper = EtcdMaintenance(channel, quorum, bounds, b"/test.listing/", is_owner=lambda: False, timeout_s=30.0)
        keeper.start()
        eventually(lambda: "can't start new thread" in (keeper.health or ""), "health that says why")
        channel.is_broken = False
        eventually(lambda: keeper.health is None, "health that is well again")
        keeper.stop()
        quorum.close()


@pytest.mark.promise("records-durable")
def test_full_etcd_is_reported_and_commits_wait(make: MakeCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    etcd = etcd_server_factory(f"--quota-backend-bytes={SMALL_QUOTA_BYTES}")
    bounds = MaintenanceLimits(compact_interval_s=0.0, quota_bytes=SMALL_QUOTA_BYTES, warning_share=0.5)
    catalog, outcomes = make(etcd.host_port, bounds), Outcomes()
    elected(catalog)
    large = [Op(b"%d" % number, bytes(60_000)) for number in range(60)]
    for _commit in range(3):
        assert commit(catalog, *large) is None
    eventually(lambda: "of a quota of 16 MiB" in catalog.health, "that etcd's size is told of")
    catalog.commit(large, outcomes.done())

    def is_full() -> bool:
        if not outcomes.empty:
            assert outcomes.next()[1] is None
            catalog.commit(large, outcomes.done())
        return NO_SPACE in catalog.health

    eventually(is_full, "that etcd is full")
    with grpc.insecure_channel(etcd.host_port) as channel:
        free(channel)
    assert outcomes.next() == (0, None)
    eventually(lambda: NO_SPACE not in catalog.health, "that the alarm is gone")


def free(channel: grpc.Channel) -> None:
    """Follow the advice of the health message."""
    kv, maintenance = rpc_pb2_grpc.KVStub(channel), rpc_pb2_grpc.MaintenanceStub(channel)
    newest = kv.Range(rpc_pb2.RangeRequest(key=b"x")).header.revision
    kv.Compact(rpc_pb2.CompactionRequest(revision=newest, physical=True))
    maintenance.Defragment(rpc_pb2.DefragmentRequest())
    full = rpc_pb2.AlarmType.Value("NOSPACE")
    for alarm in maintenance.Alarm(rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET)).alarms:
        deactivate = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=alarm.memberID, alarm=full)
        maintenance.Alarm(deactivate)


@pytest.mark.slow
@pytest.mark.promise("records-durable")
def test_churn_of_several_quotas_worth_does_not_fill_etcd(make: MakeCatalog, etcd_server_factory: EtcdServerFactory) -> None:
    etcd = etcd_server_factory(f"--quota-backend-bytes={SMALL_QUOTA_BYTES}")
    catalog = make(etcd.host_port, MaintenanceLimits(compact_interval_s=0.1, quota_bytes=SMALL_QUOTA_BYTES))
    elected(catalog)
    keys = [b"%016d" % number for number in range(4000)]
    value_bytes = 40 * len(keys)
    for written in range(0, 2 * SMALL_QUOTA_BYTES, value_bytes):
        assert commit(catalog, blocks(*keys, generation=written + 1)) is None
    assert NO_SPACE not in catalog.health
    catalog.close()
    assert len(elected(make(etcd.host_port, MaintenanceLimits())).blocks) == len(keys)


def status(**fields: Any) -> Any:
    return rpc_pb2.StatusResponse(**({"leader": 1, "dbSize": 10, "dbSizeInUse": 5} | fields))


@pytest.mark.parametrize(
    ("found", "alarms", "said"),
    [
        (status(), set(), None),
        (status(dbSize=80), set(), "80 B of a quota of 100 B, 5 B of it in use"),
        (status(leader=0, dbSize=80), set(), "no leader"),
        (status(leader=0), {1}, NO_SPACE),
        (status(), {1, 2}, CORRUPT),
    ],
)
def test_the_worst_that_is_wrong_is_told(found: Any, alarms: set[int], said: str | None) -> None:
    told = problem_of(found, alarms, MaintenanceLimits(quota_bytes=100))
    assert (said is None) == (told is None)
    assert said is None or said in str(told)
