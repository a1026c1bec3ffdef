"""Promises of metrics.py: a client's figures in the program's own registry, as the list of metrics has them; with a real cluster."""

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.client.stats import PERIOD, ClientMetrics, ClientStats, Timings
from kvstore.telemetry.metrics.metric import CLIENT
from tests.forked import Forked


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterPlan(dram="4MiB", is_private=True), on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.mark.promise("observable")
def test_what_is_told_is_what_is_listed(cluster: LocalCluster) -> None:
    registry = CollectorRegistry()
    with Client(cluster.address) as client:
        client.metrics().register(registry)
        for number in range(PERIOD):
            client.put(b"key %d" % number, b"x" * 100)
            client.get(b"key %d" % number)
        assert client.get_batch([b"key 1", b"none such"]) == [b"x" * 100, None]
    families = {family.name: family for family in registry.collect()}
    assert families.keys() == {metric.name for metric in CLIENT}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("kvstore_client_puts_total") == PERIOD
    assert value("kvstore_client_hits_total", tier="dram") == PERIOD + 1
    assert value("kvstore_client_misses_total") == 1
    assert value("kvstore_client_written_bytes_total") == 100 * PERIOD
    assert value("kvstore_client_operation_duration_seconds_count", operation="get_batch") == 1
    quick = [value("kvstore_client_operation_duration_seconds_count", operation=name) or 0 for name in ("get", "put")]
    assert sum(quick) == 1 + PERIOD, "one in so many is timed, and stands for them"


def test_the_default_registry_is_the_one_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    ClientMetrics(ClientStats, Timings()).register()
    assert registry.get_sample_value("kvstore_client_puts_total") == 0
