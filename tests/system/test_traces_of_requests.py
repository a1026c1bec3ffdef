"""Promises of docs/tracing.md about the router and the sidecar, with real processes and a real collector."""

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from kvstore.cli.tools.child import Child
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, InstanceRole, SchedulerClient
from kvstore.protocol.traceparent import TraceParent, parse_traceparent
from tests.forked import Forked
from tests.router.scripted import PROMPT, choice, following
from tests.telemetry.tracing.collector import Came, Collector, collecting

START_S: Final = 120.0
PARENT: Final = TraceParent(0xABCDEF, 11)


class Engine:
    """One that prefills and decodes, and keeps the traceparents that came, by what was asked for."""

    def __init__(self) -> None:
        self.came: dict[str, list[str | None]] = {"metrics": [], "prefill": [], "decode": []}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                engine.came["metrics"].append(self.headers["traceparent"])
                self._answer("text/plain", b"vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n")

            def do_POST(self) -> None:  # noqa: N802
                asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                is_prefill = asked["kv_transfer_params"].get("do_remote_decode", False)
                engine.came["prefill" if is_prefill else "decode"].append(self.headers["traceparent"])
                answer = choice(following(asked["prompt"], asked["max_tokens"]), "length")
                self._answer("application/json", json.dumps({**answer, "kv_transfer_params": {}}).encode())

            def _answer(self, kind: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def config(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of daemons that trace all that begins with them, and send at once."""
    path = tmp_path_factory.mktemp("tracing") / "kvstore.toml"
    path.write_text(f'[tracing]\nendpoint = "{collector.endpoint}"\nsample_ratio = 1.0\n[master]\ninstance_ttl_s = 600\n')
    return path


@pytest.fixture(scope="module")
def cluster(config: Path) -> Iterator[LocalCluster]:
    with LocalCluster(ClusterPlan(dram="8MiB", is_private=True, config=str(config)), on_log=lambda *_: None, start=Forked) as cluster:
        cluster.wait_ready()
        yield cluster


@contextmanager
def daemon(module: str, config: Path, *flags: str) -> Iterator[dict[str, Any]]:
    """Start a daemon and yield its ready message."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    flags = ("--config", str(config), *flags)
    child = Child("traced", module, flags, environment=environment, on_log=lambda *_: None, on_end=lambda *_: None)
    try:
        yield child.facts("ready", deadline_s=START_S)
    finally:
        child.kill()


def ask(address: str, *, traceparent: str = "", path: str = "/v1/completions") -> None:
    headers = {"Content-Type": "application/json"} | ({"traceparent": traceparent} if traceparent else {})
    body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 4}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", body, headers), timeout=START_S) as response:
        assert response.status == 200


def named(span: Came) -> TraceParent:
    return TraceParent(int(span.trace_id, 16), int(span.span_id, 16))


def test_request_is_one_trace_from_client_to_engines(cluster: LocalCluster, config: Path, collector: Collector, engine: Engine) -> None:
    with SchedulerClient(ClientSettings(master=cluster.address)) as scheduler:
        for name, role in (("p", InstanceRole.PREFILL), ("d", InstanceRole.DECODE)):
            scheduler.report(InstanceReport(name=name, role=role, address=engine.url))
        flags = ("--master", cluster.address, "--listen", "127.0.0.1:0", "--model", "m", "--block-tokens", "4")
        with daemon("kvstore.router.daemon", config, *flags) as router:
            ask(router["listen"], traceparent=PARENT.text())
            request = collector.part_of(f"{PARENT.span_id:016x}", "kvstore.router.completions")
            ask(router["listen"], traceparent=PARENT.text()[:-1] + "0")
            ask(router["listen"])
            collector.named("kvstore.router.completions", 2)
        for name in "pd":
            scheduler.leave(name)
    assert (request.service, request.trace_id) == ("kvstore-router", f"{PARENT.trace_id:032x}")
    schedule = collector.part_of(request.span_id, "kvstore.router.schedule")
    assert collector.part_of(schedule.span_id, "kvstore.master.schedule").service == "kvstore-master"
    for name in ("prefill", "decode"):
        part = collector.part_of(request.span_id, f"kvstore.router.{name}")
        sampled, unsampled, by_chance = engine.came[name]
        assert sampled == named(part).text()
        assert unsampled == PARENT.text()[:-1] + "0"
        assert by_chance is not None
    roots = [span for span in collector.named("kvstore.router.completions", 2) if not span.parent_id]
    assert len(roots) == 1, "that which named no trace; the one that was not sampled has none"


def test_sidecar_report_is_one_trace_with_the_master(cluster: LocalCluster, config: Path, collector: Collector, engine: Engine) -> None:
    flags = ("--engine", engine.url, "--master", cluster.address, "--name", "e", "--deadline-s", "60")
    with daemon("kvstore.engines.sidecar.daemon", config, *flags):
        report = collector.spans("kvstore.sidecar.report")["kvstore.sidecar.report"]
        assert (report.service, report.parent_id) == ("kvstore-sidecar", "")
        assert collector.part_of(report.span_id, "kvstore.master.report").trace_id == report.trace_id
    assert named(report) in [parse_traceparent(came or "") for came in engine.came["metrics"]]
