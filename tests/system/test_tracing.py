"""Promises of docs/tracing.md, with real daemons and a real collector: one trace over client, node and master, below the program's span,
also of what daemons ask one another."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.transfer.config import TransferSettings
from tests.system.traced_cluster import traced_cluster
from tests.telemetry.tracing.collector import Came, Collector, collecting

BY_MESSAGE = TransferSettings(transports="tcp")
"""As from another host: every read and put is a message."""
LARGE = 300_000
"""Not sent in a message where there is shared memory."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with traced_cluster(collector, tmp_path_factory.mktemp("tracing"), nodes=2) as cluster:
        yield cluster


@pytest.fixture
def traced(cluster: LocalCluster, collector: Collector) -> Iterator[Client]:
    """Its calls are traced within a span of the program's. Its daemon is asked by shared memory."""
    with Client(cluster.address, tracing=to(collector)) as client:
        yield client


def to(collector: Collector, *, sample_ratio: float = 0.0) -> TracingSettings:
    return TracingSettings(endpoint=collector.endpoint, sample_ratio=sample_ratio, flush_interval_s=0.01)


def engine(sampler: Sampler) -> trace.Tracer:
    """Return the tracer of a program with its own tracing."""
    return TracerProvider(sampler=sampler, shutdown_on_exit=False).get_tracer("engine")


@pytest.mark.promise("tracing-free")
def test_trace_spans_client_node_and_master_below_engine(cluster: LocalCluster, collector: Collector) -> None:
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=to(collector)) as client:
        with engine(ALWAYS_ON).start_as_current_span("step") as step:
            assert client.put(b"one secret key", b"x" * 5000, namespace="n", ack="cluster")
            assert client.get(b"one secret key") == b"x" * 5000
            asked = client.locate([b"one secret key"])
        root = step.get_span_context()
    assert asked
    spans = collector.spans(
        *("kvstore.put", "kvstore.get", "kvstore.locate"),
        *("kvstore.master.reserve", "kvstore.node.put", "kvstore.node.read_blocks", "kvstore.master.lookup"),
    )
    assert {span.trace_id for span in spans.values()} == {f"{root.trace_id:032x}"}
    for name in ("put", "get", "locate"):
        assert spans[f"kvstore.{name}"].parent_id == f"{root.span_id:016x}"
        assert spans[f"kvstore.{name}"].service == "kvstore-client"
    parents = {"master.reserve": "put", "node.put": "put", "node.read_blocks": "get", "master.lookup": "locate"}
    for name, parent in parents.items():
        assert spans[f"kvstore.{name}"].parent_id == spans[f"kvstore.{parent}"].span_id
        assert spans[f"kvstore.{name}"].service == f"kvstore-{name.partition('.')[0]}"
    told = spans["kvstore.put"].attributes
    assert (told["kvstore.keys"], told["kvstore.stored"], told["kvstore.bytes"], told["kvstore.way"]) == (1, 1, 5000, "frame")
    told = spans["kvstore.get"].attributes
    assert (told["kvstore.hits"], told["kvstore.bytes"], told["kvstore.way"]) == (1, 5000, "frame")
    assert "secret" not in repr(collector.all())


def test_calls_of_the_control_plane_are_parts_too(cluster: LocalCluster, collector: Collector) -> None:
    with Client(cluster.address, tracing=to(collector, sample_ratio=1)) as client:
        client.put(b"listed", b"value", ack="cluster")
        assert client.status()["nodes"]
        keys = client.keys()
    assert b"listed" in keys
    spans = collector.spans("kvstore.status", "kvstore.keys", "kvstore.master.status", "kvstore.master.list_keys")
    for of_client, of_master in (("status", "status"), ("keys", "list_keys")):
        assert spans[f"kvstore.master.{of_master}"].parent_id == spans[f"kvstore.{of_client}"].span_id
        assert spans[f"kvstore.master.{of_master}"].error == ""


@pytest.mark.promise("tracing-free")
def test_trace_sampling_is_all_or_nothing(cluster: LocalCluster, collector: Collector) -> None:
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
    # The same loop has served the earlier requests, so their spans would be here by now.
    assert not {"kvstore.match_prefix", "kvstore.master.match_prefix"} & {span.name for span in collector.all()}


def test_a_read_of_shared_memory_asks_nobody_and_says_so(cluster: LocalCluster, collector: Collector) -> None:
    settings = ClientSettings(get_inline_bytes=0)
    with Client(cluster.address, settings=settings, tracing=to(collector, sample_ratio=1)) as client:
        client.put(b"near", b"n" * 4096)
        client.flush()
        client.get_into(b"near", bytearray(4096))  # finds the node, and maps its memory
        client.get_batch([b"near", b"none such"])
        for _ in range(3):
            assert client.get_batch([b"near"]) == [b"n" * 4096]
    told = collector.spans("kvstore.get_batch")["kvstore.get_batch"].attributes
    assert told == {"kvstore.keys": 1, "kvstore.hits": 1, "kvstore.bytes": 4096, "kvstore.requests": 0, "kvstore.way": "shared memory"}


@pytest.mark.promise("tracing-free")
def test_a_collector_that_is_away_holds_up_nobody(cluster: LocalCluster) -> None:
    away = TracingSettings(endpoint="http://127.0.0.1:9/v1/traces", sample_ratio=1)
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=away) as client:
        for number in range(50):
            assert client.put(b"away %d" % number, b"v")
        metrics = client.metrics()
    spans = metrics.read()["kvstore_client_trace_spans"]
    assert isinstance(spans, dict)
    assert spans["exported",] == 0
    assert spans["failed",] + spans["dropped",] == 50


# --- what daemons ask one another ---


@contextmanager
def step() -> Iterator[str]:
    """A span of the program's own, by its id."""
    with engine(ALWAYS_ON).start_as_current_span("step") as span:
        yield f"{span.get_span_context().span_id:016x}"


def chain(collector: Collector, span_id: str, *names: str) -> list[Came]:
    """The spans of these names, each below the one before, the first below that span, once they have come."""
    found = list[Came]()
    for name in names:
        found.append(collector.part_of(found[-1].span_id if found else span_id, f"kvstore.{name}"))
        assert found[-1].trace_id == found[0].trace_id
        assert found[-1].service == f"kvstore-{name.partition('.')[0] if '.' in name else 'client'}"
    return found


def test_trace_shows_publication_wait_of_reserved_put(cluster: LocalCluster, collector: Collector) -> None:
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=to(collector)) as client, step() as root:
        assert client.put_batch([b"published 1", b"published 2"], [b"x" * 1000] * 2, ack="cluster") == [True, True]
    _call, put, publish = chain(collector, root, "put_batch", "node.put", "master.publish")
    assert publish.attributes["kvstore.blocks"] == 2
    assert collector.part_of(put.span_id, "kvstore.node.wait_for_master").duration_ns <= put.duration_ns


@pytest.mark.parametrize(("size", "by"), [(1000, "node.put"), (LARGE, "node.commit_puts")])
def test_trace_of_flush_links_the_puts_it_commits(traced: Client, collector: Collector, size: int, by: str) -> None:
    with step() as root:
        assert traced.put(b"kept %d" % size, b"x" * size)
        traced.flush()
    commit = chain(collector, root, "put", by, "master.commit_blocks")[-1]
    flush = chain(collector, root, "flush", "node.wait_committed")[-1]
    assert commit.links in ((flush.span_id,), ()), "the commit request was sent with the flush, or before it"


def test_trace_of_put_shows_replica_copies(traced: Client, collector: Collector) -> None:
    with step() as root:
        assert traced.put(b"copied", b"x" * 1000, replicas=2, ack="replicas")
    (call,) = chain(collector, root, "put")
    fetch = collector.spans("kvstore.node.fetch_copies")["kvstore.node.fetch_copies"]
    assert fetch.attributes == {"kvstore.blocks": 1}
    copy = collector.span(fetch.parent_id)
    asked = collector.span(copy.parent_id)  # the first request orders the copies, the later ones only poll
    assert (copy.name, asked.name, asked.parent_id) == ("kvstore.node.copy_blocks", "kvstore.master.replicate", call.span_id)
    for name in ("node.read_blocks", "master.copy_result"):
        (asked,) = chain(collector, fetch.span_id, name)
        assert (asked.trace_id, asked.error) == (call.trace_id, "")


def test_trace_of_remove_shows_the_deleting_nodes(traced: Client, collector: Collector) -> None:
    with step() as root:
        traced.put(b"removed", b"x", ack="cluster")
        assert traced.remove([b"removed"]) == 1
    chain(collector, root, "remove", "master.remove", "node.delete_blocks")
