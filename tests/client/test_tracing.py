"""Promises of client/tracing.py: what a call's span says of it, and that a client which traces nothing is as it is. A real cluster."""

import asyncio
from collections.abc import Iterator

import pytest

from kvstore.cli.tools.cluster import ClusterPlan
from kvstore.client import AsyncClient, Client
from kvstore.client.tracing import CALLS, transport_of
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.tracing import SampledCall
from kvstore.telemetry.tracing.config import TracingSettings
from tests.client.embedded import embedded
from tests.forks import told_by_child
from tests.telemetry.tracing.collector import Collector, collecting


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with embedded(ClusterPlan(dram="8MiB", is_private=True)) as cluster:
        yield cluster.address


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def all_to(collector: Collector) -> TracingSettings:
    return TracingSettings(endpoint=collector.endpoint, sample_ratio=1)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_client_without_tracing_is_unwrapped(kind: type[Client | AsyncClient]) -> None:
    assert not set(CALLS) & set(vars(kind("127.0.0.1:1")))


def test_tracing_settings_come_from_the_environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TRACING_ENDPOINT", collector.endpoint)
    assert set(CALLS) <= set(vars(Client("127.0.0.1:1")))
    assert not set(CALLS) & set(vars(Client("127.0.0.1:1", tracing=TracingSettings())))


def test_of_calls_that_are_timed_each_has_one_span(address: str, collector: Collector) -> None:
    async def test() -> None:
        async with AsyncClient(address, tracing=all_to(collector)) as client:
            for _ in range(70):  # of which two are timed
                await client.get(b"none such")

    asyncio.run(test())
    with Client(address, tracing=all_to(collector)) as client:
        for _ in range(70):
            client.get(b"none such")
    assert len(collector.all()) == 140
    assert {span.name for span in collector.all()} == {"kvstore.get"}
    assert {span.parent_id for span in collector.all()} == {""}


def test_a_forked_child_waits_for_no_lock_that_its_parent_held(collector: Collector) -> None:
    with Client("127.0.0.1:1", tracing=all_to(collector)) as client:
        assert client.tracing is not None
        with client.tracing.queue._lock:
            assert told_by_child(lambda: client.get(b"key")) == "Forked"


def test_the_way_of_values() -> None:
    call = SampledCall(TraceParent(1, 1))
    assert transport_of(call) == "shared memory"
    call.requests = 1
    assert transport_of(call) == "frame"
    call.is_moved_by_engine = True
    assert transport_of(call) == "engine"
