"""Promises of deploy/make_dashboards.py: the files are those that it makes, promtool takes them, and the alerts fire when they should, and
only then, on figures scraped from a real cluster."""

import json
import math
import re
import subprocess
from collections.abc import Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.telemetry.metrics.alerts import ALERTS
from kvstore.telemetry.metrics.metric import METRICS, MetricKind
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Process
from tests.forked import Forked
from tests.telemetry.http.asking import ask

pytestmark = pytest.mark.slow

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
MINUTES = 20
"""Of each of the two states that a test shows, at a sample a minute."""
Series = dict[str, float]
DAY_S = 86_400.0
CERTIFICATE = 'kvstore_master_certificate_valid_seconds{instance="master-1",job="kvstore-master",setting="tls_cert"}'
TOKEN = 'kvstore_master_token_valid_seconds{instance="master-1",job="kvstore-master",kind="tenant",name="red"}'
RAIL = 'kvstore_node_rail_rests_total{instance="node-0",job="kvstore-node",transport="tcp",rail="eth0"}'
"""Between nodes of one host there are no rails: of this one alone the figures are made up."""
SLOW = ("kvstore_node_request_duration_seconds_bucket{", "kvstore_master_catalog_commit_duration_seconds_bucket{")


def load_maker() -> Any:
    spec = spec_from_file_location("make_dashboards", DEPLOY / "make_dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_files_are_those_that_are_made() -> None:
    for path, text in load_maker().files().items():
        assert path.read_text(encoding="utf-8") == text, "run: python deploy/make_dashboards.py"


def test_promtool_takes_the_alerts() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(RULES))


def expressions() -> list[str]:
    """Of all panels and alerts."""
    boards = [json.loads(path.read_text()) for path in (DEPLOY / "grafana").glob("*.json")]
    queries = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", "1m") for query in queries] + [alert.expression for alert in ALERTS]


@pytest.mark.promise("observable")
def test_every_query_is_promql_over_metrics_that_there_are(tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(expressions())]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(file))
    known = {metric.exported_name for metric in METRICS}
    known |= {f"{metric.name}_{part}" for metric in METRICS if metric.kind is MetricKind.HISTOGRAM for part in ("bucket", "sum", "count")}
    known |= {"kvstore_", "kvstore"}  # of a pattern, and of the jobs' names
    for query in expressions():
        assert set(re.findall(r"kvstore[a-z_]*", query)) <= known, query


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    config = tmp_path / "config.toml"
    config.write_text("[master]\nnode_ttl_s = 5.0\nheartbeat_interval_s = 0.1\n")
    plan = ClusterPlan(dram="2MiB", nodes=2, catalog=f"lmdb:{tmp_path / 'catalog'}", config=str(config), is_private=True)
    with LocalCluster(plan, on_log=lambda name, line: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster


def scrape(targets: dict[str, str], **headers: str) -> Series:
    """All samples of the daemons at these addresses by instance, as PromQL names them, and `up` of each."""
    found: Series = {}
    for instance, address in targets.items():
        job = f'instance="{instance}",job="kvstore-{instance.partition("-")[0]}"'
        try:
            text = ask(address, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"} | headers).text
        except OSError:
            found[f"up{{{job}}}"] = 0
            continue
        found[f"up{{{job}}}"] = 1
        for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
            for sample in family.samples:
                labels = "".join(f',{name}="{value}"' for name, value in sample.labels.items())
                found[f"{sample.name}{{{job}{labels}}}"] = sample.value
    return found


@pytest.mark.promise("observable")
def test_alerts_fire_when_a_node_is_killed_and_none_before(cluster: LocalCluster, tmp_path: Path) -> None:
    with cluster.control() as control:
        status = control.status()
    targets = {"master-1": status.http} | {node.name: node.http for node in status.nodes}
    with Client(cluster.address) as client:
        for number in range(200):
            client.put(b"key %d" % number, bytes(4096), ack="cluster")
            client.get(b"key %d" % number)
    before = scrape(targets)
    cluster.kill_node(0)
    with cluster.control() as control:
        eventually(lambda: [node.state for node in control.status().nodes].count("dead") == 1, "a master that says that a node is dead")
    after = scrape(targets)
    assert after['kvstore_master_nodes{instance="master-1",job="kvstore-master",state="dead"}'] == 1
    check(tmp_path, before, after, {"KvstoreDaemonDown", "KvstoreNodeDead"})


def test_alerts_fire_on_what_a_cluster_in_trouble_says(cluster: LocalCluster, tmp_path: Path) -> None:
    """Figures of a real cluster, of which a few are, or grow, as they do in that trouble."""
    with cluster.control() as control:
        status = control.status()
    with Client(cluster.address) as client:
        for number in range(2 * 2 * (2 << 20) // 4096):
            client.put(b"key %d" % number, bytes(4096))
    targets = {"master-1": status.http} | {node.name: node.http for node in status.nodes}
    eventually(lambda: any(name.startswith("kvstore_node_eviction_age_seconds_bucket{") for name in scrape(targets)), "ages of the evicted")
    router = Process("kvstore.router.daemon", "--listen", "127.0.0.1:0", "--model", "m", "--master", cluster.address, log=tmp_path / "log")
    before = scrape(targets | {"router-1": router.ready["http"]}) | {RAIL: 0, CERTIFICATE: 90 * DAY_S, TOKEN: 90 * DAY_S}
    router.stop()
    assert "kvstore_node_rail_rests_total" in {metric.exported_name for metric in METRICS}
    after, rises = before | {CERTIFICATE: 5 * DAY_S, TOKEN: -1}, {RAIL: 1.0}
    for series in after:
        if series.startswith(
            ("kvstore_node_ready{", "kvstore_master_partitions_owned{", "kvstore_master_catalog_healthy{", "kvstore_node_tier_healthy{")
        ):
            after[series] = 0
        if series.startswith("kvstore_node_waiting_requests{"):
            after[series] = 3
        if series.startswith("kvstore_node_publish_backlog_events{"):
            after[series] = 1e6
        if series.startswith("kvstore_node_corrupt_reads_total{"):
            after[series] += 1
        if series.startswith("kvstore_node_tier_used_bytes{"):
            after[series] /= 2
        if series.startswith("kvstore_node_tier_evictions_total{") and 'reason="table"' in series:
            rises[series] = 5
        if series.startswith(("kvstore_master_takeovers_total{", "kvstore_router_failures_total{")):
            rises[series] = 1
        if series.startswith("kvstore_router_requests_total{"):
            rises[series] = 15
        if series.startswith("kvstore_node_quota_refused_total{"):
            rises[series] = 120
        if series.startswith(SLOW) and bound_s(series) >= 1.0:
            rises[series] = 60
        if series.startswith("kvstore_node_eviction_age_seconds_bucket{") and bound_s(series) >= 15.0:
            rises[series] = 60
    trouble = {alert.name for alert in ALERTS} - {"KvstoreDaemonDown", "KvstoreNodeDead", "KvstoreRefusedCredentials"}
    check(tmp_path, before, after, trouble, rises)


def bound_s(series: str) -> float:
    """Of a bucket."""
    (bound,) = re.findall(r'le="([^"]+)"', series)
    return float(bound)


def check(folder: Path, before: Series, after: Series, expected: set[str], rises: Mapping[str, float] = MappingProxyType({})) -> None:
    """By promtool: with the one for MINUTES, then the other, which `rises` by so much a minute, no alert fires in the first time and
    `expected` do in the second."""

    def values(series: str) -> str:
        first = f"{number(before[series])}+0x{MINUTES - 1}" if series in before else f"_x{MINUTES}"
        then = f"{number(after[series])}+{rises.get(series, 0)}x{MINUTES - 1}" if series in after else f"stale _x{MINUTES - 1}"
        return f"{first} {then}"

    def number(value: float) -> str:
        assert not math.isnan(value)
        return f"{value:.17g}"

    names = [alert.name for alert in ALERTS]
    for what, minute, firing in (("before", MINUTES - 1, set[str]()), ("after", 2 * MINUTES - 2, expected)):
        for name in names:
            file = folder / f"{what}-{name}.json"
            query = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > bool 0'
            samples = [{"labels": "{}", "value": 1}] if name in firing else []
            test = {
                "interval": "1m",
                "input_series": [{"series": series, "values": values(series)} for series in before | after],
                "promql_expr_test": [{"expr": query, "eval_time": f"{minute}m", "exp_samples": samples}],
            }
            file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", *(str(path) for path in sorted(folder.glob("*-Kvstore*.json"))))
