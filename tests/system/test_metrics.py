"""Promises of metrics: a real cluster exports exactly the metrics of the list, and the figures are right."""

import re
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.telemetry.metrics.metric import MASTER, NODE, Metric
from kvstore.testing.transfer.awaited import eventually
from tests.forked import Forked
from tests.telemetry.http.asking import ask

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ROOM_BLOCKS = 512
"""Blocks of 4 KiB that a node's DRAM holds."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    plan = ClusterPlan(dram="2MiB", nvme="1MiB", nodes=1, catalog=f"lmdb:{tmp_path_factory.mktemp('catalog')}", is_private=True)
    with LocalCluster(plan, on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster


def scraped(http: str) -> tuple[dict[str, str], Samples]:
    """The families' kinds by name, and all samples."""
    answer = ask(http, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.status == 200, answer.text
    families = list(text_string_to_metric_families(answer.text))  # type: ignore[no-untyped-call]
    samples = {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}
    return {family.name: family.type for family in families if not family.name.startswith("process_")}, samples


def https(cluster: LocalCluster) -> tuple[str, str]:
    """Of master and node, as status names them."""
    with cluster.control() as control:
        status = control.status()
    return status.http, status.nodes[0].http


@pytest.mark.promise("observable")
@pytest.mark.parametrize(("metrics", "which"), [(MASTER, 0), (NODE, 1)], ids=["master", "node"])
def test_what_is_told_is_what_is_listed(cluster: LocalCluster, metrics: tuple[Metric, ...], which: int) -> None:
    kinds, samples = scraped(https(cluster)[which])
    assert kinds == {metric.name: str(metric.kind) for metric in metrics}
    listed = {metric.name: set(metric.labels) for metric in metrics}
    for name, labels in samples:
        if not name.startswith("process_"):
            family = next(found for found in listed if re.fullmatch(rf"{found}(_total|_bucket|_count|_sum)?", name))
            assert {label for label, _ in labels} - {"le"} == listed[family], name


@pytest.mark.promise("observable")
def test_figures_are_those_of_what_was_done(cluster: LocalCluster) -> None:
    master, node = https(cluster)
    _, before = scraped(node)

    def grown(name: str, **labels: str) -> float:
        at = name, tuple(sorted(labels.items()))
        return scraped(node)[1].get(at, 0) - before.get(at, 0)

    with Client(cluster.address, tenant="red") as client:
        for number in range(2 * ROOM_BLOCKS):
            client.put(b"key %d" % number, bytes(4096))
        client.flush()
        assert client.get(b"key %d" % (2 * ROOM_BLOCKS - 1)) == bytes(4096)
        with Client(cluster.address, tenant="red") as other:
            assert other.get(b"none such") is None
        eventually(lambda: grown("kvstore_node_tier_hits_total", tier="dram", tenant="red") >= 1, "a hit that the node has heard of")
    assert grown("kvstore_node_request_duration_seconds_count", operation="put") >= 2 * ROOM_BLOCKS
    assert grown("kvstore_node_written_bytes_total") >= 2 * ROOM_BLOCKS * 4096
    reasons = [(tier, reason) for tier in ("dram", "nvme") for reason in ("room", "worth")]
    left = sum(grown("kvstore_node_tier_evictions_total", tier=tier, reason=reason) for tier, reason in reasons)
    moved = grown("kvstore_node_tier_demotions_total", tier="dram")
    assert left + moved > 0
    ages = sum(grown("kvstore_node_eviction_age_seconds_count", tier=tier) for tier in ("dram", "nvme"))
    assert ages == left
    _, told = scraped(master)
    assert told["kvstore_master_nodes", (("state", "alive"),)] == 1
    assert told["kvstore_master_partitions", ()] == told["kvstore_master_partitions_owned", ()] == 1
    assert told["kvstore_master_blocks", ()] > 0
    assert told["kvstore_master_catalog_commit_duration_seconds_count", ()] > 0
    assert told["kvstore_master_catalog_size_bytes", ()] > 0


def test_what_is_refused_is_counted_by_its_reason(cluster: LocalCluster) -> None:
    master, _ = https(cluster)

    def refused() -> float:
        return scraped(master)[1].get(("kvstore_master_requests_refused_total", (("reason", "invalid_argument"),)), 0)

    before = refused()
    with pytest.raises(InvalidArgument):
        Channel.open(parse_address(cluster.address), Hello(ROLE_CLIENT + 99, "red"), Deadline(60))
    assert refused() == before + 1
