"""Promises of docs/tracing.md about what daemons ask one another for a traced request, with real processes and a real collector: it is
below the span of that request, and of others nothing is sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from kvstore.client import Client
from kvstore.client.tools.cluster import Cluster
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.transfer.config import TransferSettings
from tests.system.traced_cluster import traced_cluster
from tests.telemetry.tracing.collector import Came, Collector, collecting

BY_MESSAGE: Final = TransferSettings(transports="tcp")
"""As from another host: the writer reserves, and its put is published."""
LARGE: Final = 300_000
"""Not sent in a message where there is shared memory."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with traced_cluster(collector, tmp_path_factory.mktemp("tracing"), nodes=2) as cluster:
        yield cluster


@pytest.fixture
def traced(cluster: Cluster, collector: Collector) -> Iterator[Client]:
    """Its calls are traced within a span of the program's. Its daemon is asked by shared memory."""
    with Client(cluster.address, tracing=to(collector)) as client:
        yield client


def to(collector: Collector, *, sample_ratio: float = 0.0) -> TracingSettings:
    return TracingSettings(endpoint=collector.endpoint, sample_ratio=sample_ratio, flush_interval_s=0.01)


@contextmanager
def step() -> Iterator[str]:
    """A span of the program's own, by its id."""
    tracer = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False).get_tracer("engine")
    with tracer.start_as_current_span("step") as span:
        yield f"{span.get_span_context().span_id:016x}"


def chain(collector: Collector, span_id: str, *names: str) -> list[Came]:
    """The spans of these names, each below the one before, the first below that span, once they have come."""
    found = list[Came]()
    for name in names:
        found.append(collector.part_of(found[-1].span_id if found else span_id, f"kvstore.{name}"))
        assert found[-1].trace_id == found[0].trace_id
        assert found[-1].service == f"kvstore-{name.partition('.')[0] if '.' in name else 'client'}"
    return found


def test_a_put_whose_node_asks_the_master_for_the_key_is_one_trace_to_the_master(traced: Client, collector: Collector) -> None:
    with step() as root:
        assert traced.put(b"claimed", b"x" * 1000, ack="cluster")
    claim = chain(collector, root, "put", "node.put", "master.claim")[-1]
    assert claim.attributes == {"kvstore.blocks": 1}


def test_a_put_that_was_reserved_waits_for_its_publication_in_sight(cluster: Cluster, collector: Collector) -> None:
    with Client(cluster.address, transfer=BY_MESSAGE, tracing=to(collector)) as client, step() as root:
        assert client.put_batch([b"published 1", b"published 2"], [b"x" * 1000] * 2, ack="cluster") == [True, True]
    _call, put, publish = chain(collector, root, "put_batch", "node.put", "master.publish")
    assert publish.attributes["kvstore.blocks"] == 2
    assert collector.part_of(put.span_id, "kvstore.node.wait_for_master").duration_ns <= put.duration_ns


def test_a_large_put_through_shared_memory_shows_its_publication_too(traced: Client, collector: Collector) -> None:
    with step() as root:
        assert traced.put(b"large", b"x" * LARGE, ack="cluster")
    chain(collector, root, "put", "node.commit", "master.publish")


@pytest.mark.parametrize(("size", "by"), [(1000, "node.put"), (LARGE, "node.commit")])
def test_what_the_cluster_learns_after_a_put_is_below_that_put_and_names_the_flush(
    traced: Client, collector: Collector, size: int, by: str
) -> None:
    with step() as root:
        assert traced.put(b"kept %d" % size, b"x" * size)
        traced.flush()
    claim = chain(collector, root, "put", by, "master.claim")[-1]
    flush = chain(collector, root, "flush", "node.flush")[-1]
    assert claim.links in ((flush.span_id,), ()), "the claim went out with the flush, or before it"


def test_a_put_that_waits_for_replicas_shows_who_copied_what_from_whom(traced: Client, collector: Collector) -> None:
    with step() as root:
        assert traced.put(b"copied", b"x" * 1000, replicas=2, ack="replicas")
    (call,) = chain(collector, root, "put")
    fetch = collector.spans("kvstore.node.fetch_copies")["kvstore.node.fetch_copies"]
    assert fetch.attributes == {"kvstore.blocks": 1}
    copy = collector.span(fetch.parent_id)
    asked = collector.span(copy.parent_id)  # the first question orders the copies, those that come after it only look
    assert (copy.name, asked.name, asked.parent_id) == ("kvstore.node.copy", "kvstore.master.replicate", call.span_id)
    for name in ("node.read", "master.copied"):
        (asked,) = chain(collector, fetch.span_id, name)
        assert (asked.trace_id, asked.error) == (call.trace_id, "")


def test_a_removal_shows_the_nodes_that_it_waited_for(traced: Client, collector: Collector) -> None:
    with step() as root:
        traced.put(b"removed", b"x", ack="cluster")
        assert traced.remove([b"removed"]) == 1
    chain(collector, root, "remove", "master.remove", "node.drop")


def test_of_what_is_not_sampled_no_daemon_has_a_span(cluster: Cluster, traced: Client, collector: Collector) -> None:
    before = {span.trace_id for span in collector.all()}
    off = to(collector)
    with Client(cluster.address, tracing=off) as client, Client(cluster.address, transfer=BY_MESSAGE, tracing=off) as other:
        assert client.put(b"unseen", b"x" * 1000, replicas=2, ack="replicas")
        assert other.put(b"unseen, too", b"x" * 1000, ack="cluster")
        assert client.put(b"unseen, kept", b"x")
        client.flush()
        assert client.remove([b"unseen"]) == 1
    with step() as root:
        assert traced.put(b"seen", b"x", ack="cluster")
    # What was asked before by the same loops would be here by now.
    put = chain(collector, root, "put", "node.put", "master.claim")[0]
    assert {span.trace_id for span in collector.all()} - before <= {put.trace_id}
