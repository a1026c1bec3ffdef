"""Promises of docs/tracing.md, with real daemons and a real collector: one trace over client, node and master, below the program's span."""

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from kvstore.client import AsyncClient, Client
from kvstore.client.config import ClientSettings
from kvstore.client.tools.cluster import Cluster
from kvstore.protocol.errors import InvalidArgument
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.transfer.config import TransferSettings
from tests.system.traced_cluster import traced_cluster
from tests.telemetry.tracing.collector import Collector, collecting

BY_MESSAGE = TransferSettings(transports="tcp")
"""As from another host: every read and put is a message."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with traced_cluster(collector, tmp_path_factory.mktemp("tracing")) as cluster:
        yield cluster


def to(collector: Collector, *, sample_ratio: float = 0.0) -> TracingSettings:
    return TracingSettings(endpoint=collector.endpoint, sample_ratio=sample_ratio, flush_interval_s=0.01)


def engine(sampler: Sampler) -> trace.Tracer:
    """Of a program that traces by itself."""
    return TracerProvider(sampler=sampler, shutdown_on_exit=False).get_tracer("engine")


def test_one_trace_over_client_node_and_master_below_the_engines_own_span(cluster: Cluster, collector: Collector) -> None:
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=to(collector)) as client:
        with engine(ALWAYS_ON).start_as_current_span("step") as step:
            assert client.put(b"one secret key", b"x" * 5000, namespace="n", ack="cluster")
            assert client.get(b"one secret key") == b"x" * 5000
            asked = client.locate([b"one secret key"])
        root = step.get_span_context()
    assert asked
    spans = collector.spans(
        *("kvstore.put", "kvstore.get", "kvstore.locate"),
        *("kvstore.master.reserve", "kvstore.node.put", "kvstore.node.read", "kvstore.master.lookup"),
    )
    assert {span.trace_id for span in spans.values()} == {f"{root.trace_id:032x}"}
    for name in ("put", "get", "locate"):
        assert spans[f"kvstore.{name}"].parent_id == f"{root.span_id:016x}"
        assert spans[f"kvstore.{name}"].service == "kvstore-client"
    parents = {"master.reserve": "put", "node.put": "put", "node.read": "get", "master.lookup": "locate"}
    for name, parent in parents.items():
        assert spans[f"kvstore.{name}"].parent_id == spans[f"kvstore.{parent}"].span_id
        assert spans[f"kvstore.{name}"].service == f"kvstore-{name.partition('.')[0]}"
    told = spans["kvstore.put"].attributes
    assert (told["kvstore.keys"], told["kvstore.stored"], told["kvstore.bytes"], told["kvstore.way"]) == (1, 1, 5000, "frame")
    told = spans["kvstore.get"].attributes
    assert (told["kvstore.hits"], told["kvstore.bytes"], told["kvstore.way"]) == (1, 5000, "frame")
    assert "secret" not in repr(collector.all())


def test_calls_of_the_control_plane_are_parts_too(cluster: Cluster, collector: Collector) -> None:
    with Client(cluster.address, tracing=to(collector, sample_ratio=1)) as client:
        client.put(b"listed", b"value", ack="cluster")
        assert client.status()["nodes"]
        keys = client.keys()
    assert b"listed" in keys
    spans = collector.spans("kvstore.status", "kvstore.keys", "kvstore.master.status", "kvstore.master.list_keys")
    for of_client, of_master in (("status", "status"), ("keys", "list_keys")):
        assert spans[f"kvstore.master.{of_master}"].parent_id == spans[f"kvstore.{of_client}"].span_id
        assert spans[f"kvstore.master.{of_master}"].error == ""


def test_chance_samples_all_or_nothing_and_the_engine_decides_for_its_own(cluster: Cluster, collector: Collector) -> None:
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=to(collector, sample_ratio=0)) as client:
        assert client.match_prefix([b"none such"]) == 0
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=to(collector, sample_ratio=1)) as client:
        with engine(ALWAYS_OFF).start_as_current_span("step"):
            assert client.match_prefix([b"none such"]) == 0
        for _ in range(10):
            assert client.remove([b"none such"]) == 0
    calls = {span.span_id for span in collector.named("kvstore.remove", 10) if span.parent_id == ""}
    served = collector.named("kvstore.master.remove", 10)
    assert {span.parent_id for span in served} == calls
    assert len(calls) == 10
    # What was asked before has been answered by the same loop, and would be here by now.
    assert not {"kvstore.match_prefix", "kvstore.master.match_prefix"} & {span.name for span in collector.all()}


def test_a_read_of_shared_memory_asks_nobody_and_says_so(cluster: Cluster, collector: Collector) -> None:
    settings = ClientSettings(get_inline_bytes=0)  # type: ignore[arg-type]
    with Client(cluster.address, settings=settings, tracing=to(collector, sample_ratio=1)) as client:
        client.put(b"near", b"n" * 4096)
        client.flush()
        client.get_into(b"near", bytearray(4096))  # finds the node, and maps its memory
        client.get_batch([b"near", b"none such"])
        for _ in range(3):
            assert client.get_batch([b"near"]) == [b"n" * 4096]
    told = collector.spans("kvstore.get_batch")["kvstore.get_batch"].attributes
    assert told == {"kvstore.keys": 1, "kvstore.hits": 1, "kvstore.bytes": 4096, "kvstore.requests": 0, "kvstore.way": "shared memory"}


def test_tasks_have_each_their_own_trace(cluster: Cluster, collector: Collector) -> None:
    async def test() -> None:
        async with AsyncClient(cluster.address, transfer=BY_MESSAGE, tracing=to(collector, sample_ratio=1)) as client:
            await asyncio.gather(*(client.pin([b"key %d" % number]) for number in range(5)))

    asyncio.run(test())
    calls = {span.span_id: span for span in collector.named("kvstore.pin", 5)}
    served = collector.named("kvstore.master.pin", 5)
    assert len({span.trace_id for span in calls.values()}) == len(calls) == 5
    assert {span.parent_id for span in served} == set(calls)
    assert all(calls[span.parent_id].trace_id == span.trace_id for span in served)


def test_a_refused_request_names_its_error_and_no_more(cluster: Cluster, collector: Collector) -> None:
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=to(collector, sample_ratio=1)) as client:
        with pytest.raises(InvalidArgument, match="namespace"):
            client.put_batch([b"key"], [b"value"], namespace="n" * 300)
    call = collector.spans("kvstore.put_batch")["kvstore.put_batch"]
    served = collector.part_of(call.span_id, "kvstore.node.put")
    assert (call.error, served.error) == ("InvalidArgument", "InvalidArgument")


def test_a_collector_that_is_away_holds_up_nobody(cluster: Cluster) -> None:
    away = TracingSettings(endpoint="http://127.0.0.1:9/v1/traces", sample_ratio=1)
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=away) as client:
        for number in range(50):
            assert client.put(b"away %d" % number, b"v")
        metrics = client.metrics()
    spans = metrics.read()["kvstore_client_trace_spans"]
    assert isinstance(spans, dict)
    assert spans["exported",] == 0
    assert spans["failed",] + spans["dropped",] == 50
