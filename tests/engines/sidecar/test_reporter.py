"""Promises of reporter.py and the daemon around it: with a real master, an engine's metrics over HTTP and its events over ZeroMQ."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.tools.child import Child
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import RequestPlacement, SchedulerClient
from kvstore.engines.sidecar.config import SidecarSettings, check_settings
from kvstore.engines.sidecar.reporter import _fetch
from kvstore.kvcache.key_names import VllmNaming
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ConfigError, Unavailable
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background
from tests.engines.kv_events.publisher import Publisher
from tests.master.running import Places, master_in_thread
from tests.ports import free_ports
from tests.system.running import until
from tests.telemetry.http.asking import ask

DEADLINE_S = 120.0
ID = "000102030405060708090a0b0c0d0e0f"
NAMING = VllmNaming(bytes.fromhex(ID), 2)
TOKENS = list(range(10))


class Engine:
    """Fake engine: it serves the metrics that the test sets, and publishes events."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.metrics: str | None = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
        self.metrics += "vllm:request_prompt_tokens_count 2\nvllm:request_prompt_tokens_sum 14\n"
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                found = engine.metrics
                self.send_response(500 if found is None else 200)
                self.end_headers()
                self.wfile.write((found or "").encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def store(self, start: int, stop: int) -> None:
        hashes = [100 + index for index in range(start, stop)]
        parent = 100 + start - 1 if start else None
        self.publisher.publish(["BlockStored", hashes, parent, TOKENS[2 * start : 2 * stop], 2, None, "GPU"])


@pytest.fixture
def engine(publisher: Publisher) -> Iterator[Engine]:
    found = Engine(publisher)
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with master_in_thread(tmp_path, report_interval_s=0.05, instance_ttl_s=600.0) as found:
        yield found


@pytest.fixture
def scheduler(places: Places) -> Iterator[SchedulerClient]:
    with SchedulerClient(ClientSettings(master=places.listen, deadline_s=DEADLINE_S)) as found:
        yield found


@contextmanager
def sidecar(engine: Engine, master: str, *flags: str) -> Iterator[tuple[Child, list[str]]]:
    logs: list[str] = []
    child = Child(
        "sidecar",
        "kvstore.engines.sidecar.daemon",
        (*("--engine", engine.url, "--master", master, "--name", "e", "--deadline-s", "60"), *flags),
        environment={name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")},
        on_log=lambda _name, line: logs.append(line),
        on_end=lambda _child: None,
    )
    try:
        yield child, logs
    finally:
        child.kill()


def events(engine: Engine, *, replays: bool = True) -> tuple[str, ...]:
    replay = ("--events-replay", engine.publisher.replay_endpoint) if replays else ()
    return ("--events", engine.publisher.endpoint, *replay, "--namespace-id", ID, "--block-tokens", "2")


def shown(scheduler: SchedulerClient) -> dict[str, pb.ReportRequest]:
    return {each.report.name: each.report for each in scheduler.instances().instances}


def prefix(scheduler: SchedulerClient) -> int:
    placed = scheduler.schedule(NAMING.block_keys(TOKENS), block_tokens=2, input_tokens=len(TOKENS) + 1)
    assert isinstance(placed, RequestPlacement)
    return placed.prefix_blocks


def test_an_engines_load_and_blocks_are_the_schedulers(engine: Engine, places: Places, scheduler: SchedulerClient) -> None:
    engine.store(0, 2)
    with sidecar(engine, places.listen, *events(engine)) as (child, logs):
        facts = child.facts("ready", deadline_s=DEADLINE_S)
        assert facts["name"] == "e"
        assert [ask(facts["http"], path).status for path in ("/healthz", "/readyz")] == [200, 200]
        assert "kvstore_sidecar_reporting 1.0\n" in ask(facts["http"], "/metrics").text
        report = shown(scheduler)["e"]
        assert (report.role, report.address, report.batch, report.seen_after_s) == (pb.ROLE_BOTH, engine.url, 4, 1.0)
        assert report.context_tokens == 7, "what waits, as long as others were"
        engine.publisher.await_subscriber()
        engine.store(2, 4)
        until(lambda: prefix(scheduler) == 4, "all that was stored, before and after, at the scheduler")
        engine.metrics = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        until(lambda: shown(scheduler)["e"].batch == 0, "its load")
        engine.publisher.send((99).to_bytes(8, "big"), b"\xc1")
        until(lambda: prefix(scheduler) == 0, "nothing, for what came is no batch")
        assert child.stop()
        assert logs[-1].endswith("this sidecar stops: SIGTERM [daemon_stops why=SIGTERM]")
    assert shown(scheduler) == {}


def test_unreachable_engine_gets_no_requests(engine: Engine, places: Places, scheduler: SchedulerClient) -> None:
    with sidecar(engine, places.listen, "--advertise", "http://elsewhere") as (child, logs):
        child.facts("ready", deadline_s=DEADLINE_S)
        assert shown(scheduler)["e"].address == "http://elsewhere"
        engine.metrics = None
        until(lambda: shown(scheduler) == {}, "the engine gone")
        engine.metrics = "up 1\n"
        until(lambda: any("start vLLM with" in line for line in logs), "what is missing")
        engine.metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n"
        until(lambda: "e" in shown(scheduler), "the engine again")
        assert sum("cannot read its metrics" in line for line in logs) == 1, "each complaint once"


IDLE = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


def test_sleeping_engine_gets_no_requests_and_has_no_blocks(engine: Engine, places: Places, scheduler: SchedulerClient) -> None:
    engine.metrics = IDLE
    with sidecar(engine, places.listen, *events(engine)) as (child, logs):
        child.facts("ready", deadline_s=DEADLINE_S)
        engine.publisher.await_subscriber()
        engine.store(0, 3)
        until(lambda: prefix(scheduler) == 3, "what was stored, at the scheduler")
        engine.metrics = IDLE + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
        until(lambda: shown(scheduler) == {}, "the engine gone")
        until(lambda: any("engine e sleeps" in line for line in logs), "why")
        engine.metrics = IDLE + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n'
        until(lambda: "e" in shown(scheduler), "the engine again")
        assert prefix(scheduler) == 0, "it lost its blocks, whatever it has published of that"
        engine.store(0, 1)
        until(lambda: prefix(scheduler) == 1, "what was stored since")


@pytest.mark.parametrize("replays", [True, False])
def test_restarted_engine_is_not_taken_to_have_its_blocks(
    engine: Engine, places: Places, scheduler: SchedulerClient, replays: bool
) -> None:
    """It publishes nothing of what it lost."""
    engine.metrics = IDLE + "process_start_time_seconds 100.0\n"
    with sidecar(engine, places.listen, *events(engine, replays=replays)) as (child, _):
        child.facts("ready", deadline_s=DEADLINE_S)
        engine.publisher.await_subscriber()
        engine.store(0, 3)
        until(lambda: prefix(scheduler) == 3, "what was stored, at the scheduler")
        engine.publisher.begin_again()
        engine.metrics = IDLE + "process_start_time_seconds 200.0\n"
        until(lambda: prefix(scheduler) == 0, "nothing of the engine that was before")


def test_blocks_of_an_idle_engine_are_replayed_to_a_new_sidecar(engine: Engine, places: Places, scheduler: SchedulerClient) -> None:
    """No event comes after the sidecar's start."""
    engine.metrics = IDLE
    engine.store(0, 3)
    with sidecar(engine, places.listen, *events(engine)) as (child, _):
        child.facts("ready", deadline_s=DEADLINE_S)
        until(lambda: prefix(scheduler) == 3, "what was stored before")


def test_replay_without_an_answer_is_said_and_ends_nothing(engine: Engine, places: Places, scheduler: SchedulerClient) -> None:
    engine.metrics = IDLE
    [nowhere] = free_ports(1)
    flags = ("--events", engine.publisher.endpoint, "--events-replay", f"tcp://127.0.0.1:{nowhere}", "--deadline-s", "2")
    with sidecar(engine, places.listen, *flags, "--namespace-id", ID, "--block-tokens", "2") as (child, logs):
        child.facts("ready", deadline_s=DEADLINE_S)
        assert "e" in shown(scheduler)
        until(lambda: any("did not end its replay" in line for line in logs), "why")


def test_metrics_that_come_in_drips_are_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine:

        def drip() -> None:
            connection, _ = engine.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while True:
                    connection.sendall(b"#")
                    time.sleep(0.01)

        in_background(drip)
        url = "http://127.0.0.1:{1}/metrics".format(*engine.getsockname())
        with pytest.raises(Unavailable, match="cannot read its metrics"):
            in_background(lambda: _fetch(url, 0.3)).result(PATIENCE_S)


def test_without_a_master_it_complains_and_goes_on(engine: Engine) -> None:
    [nowhere] = free_ports(1)
    with sidecar(engine, f"127.0.0.1:{nowhere}") as (child, logs):
        until(lambda: any("engine e:" in line for line in logs), "a complaint")
        assert child.stop(), "it ends when told to"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--events", "tcp://127.0.0.1:1"), "events needs a model"),
        (("--events-replay", "tcp://127.0.0.1:1"), "events_replay is set without events"),
        (("--events", "tcp://127.0.0.1:1", "--namespace-id", "00"), "32 hex digits"),
    ],
)
def test_settings_that_do_not_fit_say_so(engine: Engine, places: Places, flags: tuple[str, ...], says: str) -> None:
    with sidecar(engine, places.listen, *flags) as (child, _):
        with pytest.raises(ConfigError, match=says):
            child.facts("ready", deadline_s=DEADLINE_S)


def test_settings_that_fit_pass() -> None:
    check_settings(SidecarSettings(events="tcp://e", events_replay="tcp://r", model="m"))
