"""kvstore-router and the scheduler before a real SGLang server, on a CPU.

Answers to requests by the router and to SGLang itself are equal in every field, and its /tokenize is exact. The scheduler sees the
server's load, its blocks, and a cache that was cleared.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, InstanceRole, RequestPlacement, SchedulerClient
from kvstore.client.instances.reporter import Reporter
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol import control_pb2 as pb
from tests.client.processes import Process, cluster
from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.http_engine import PATIENCE_S, HttpEngine
from tests.engines.live.router.comparing import ask, body_of, through
from tests.engines.live.router.fleet import MODEL
from tests.engines.live.router.kinds import COMPLETIONS, KINDS
from tests.engines.live.sglang.engines import PAGE
from tests.engines.live.sglang.hicache import path
from tests.engines.live.vllm.engines import random_tokens
from tests.ports import free_ports
from tests.system.running import until

BLOCKS: Final = 6
FLAGS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.6", "--max-total-tokens", "4096"),
    *("--context-length", "1024", "--page-size", str(PAGE), "--skip-server-warmup", "--served-model-name", MODEL, "--host", "127.0.0.1"),
)
REFUSED: Final = {"chat bad format": "load; tokenize"}
"""Kinds that SGLang's /tokenize refuses, and vLLM's does not."""


@contextlib.contextmanager
def sglang(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """The URL of a server that is ready."""
    (port,) = free_ports(1)
    environment = {**os.environ, **path(), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    command = [str(python_of("sglang")), "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port), *FLAGS, *flags]
    with contextlib.closing(HttpEngine(port, command, log, environment)) as server:
        yield server.wait().url


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[str, str]]:
    """The router's and the engine's."""
    folder = tmp_path_factory.mktemp("served")
    answering = sglang(model, folder / "sglang.log", "--tool-call-parser", "qwen25", "--enable-cache-report")
    with answering as engine, cluster(folder) as started:
        report = InstanceReport(name="e0", role=InstanceRole.BOTH, address=engine, capacity_tokens=4096)
        with SchedulerClient(ClientSettings(master=started.address)) as client, Reporter(client, lambda: report):
            flags = ("--listen", "127.0.0.1:0", "--master", started.address, "--model", MODEL, "--block-tokens", str(PAGE))
            router = Process("tests.tuned_daemon", "kvstore-router", *flags, "--tokenize-timeout-s", "60", log=folder / "router.log")
            try:
                url = f"http://{router.ready['listen']}"
                through(url, COMPLETIONS, {"prompt": "Hi", "max_tokens": 1})
                yield url, engine
            finally:
                router.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_answers_as_sglang_does(urls: tuple[str, str], kind: str) -> None:
    router, engine = urls
    where, members, routed_by = KINDS[kind]
    for _ in range(2):
        expected = ask(engine, where, body_of(members))
    routed = through(router, where, members)
    assert (routed.status, routed.content_type) == (expected.status, expected.content_type)
    assert routed.body == expected.body
    assert routed.headers["x-kvstore-routed-by"] == REFUSED.get(kind, routed_by)


def test_every_prompt_was_tokenised_as_sglang_did(urls: tuple[str, str]) -> None:
    """After all of the above."""
    assert ask(urls[0], "/stats", None, method="GET").body["token_mismatches"] == 0


@dataclass
class Served:
    engine: str
    master: str

    def shown(self) -> pb.InstanceStatus:
        with SchedulerClient(ClientSettings(master=self.master, deadline_s=PATIENCE_S)) as client:
            [found] = client.instances().instances
            return found

    def prefix_blocks(self, tokens: list[int]) -> int:
        keys = Namespace(model=MODEL, dtype="float32", block_tokens=PAGE).block_keys(tokens)
        with SchedulerClient(ClientSettings(master=self.master, deadline_s=PATIENCE_S)) as client:
            placed = client.schedule(keys, block_tokens=PAGE, input_tokens=len(tokens))
        assert isinstance(placed, RequestPlacement)
        return placed.prefix_blocks


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    """With a sidecar that the scheduler knows."""
    folder = tmp_path_factory.mktemp("served")
    events, replay = free_ports(2)
    publishing = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    telling = sglang(model, folder / "sglang.log", "--enable-metrics", "--kv-events-config", json.dumps(publishing))
    with cluster(folder, "--report-interval-s", "0.1") as started, telling as url:
        sidecar = Process(
            "kvstore.engines.sidecar.daemon",
            *("--engine", url, "--events", f"tcp://127.0.0.1:{events}", "--events-replay", f"tcp://127.0.0.1:{replay}"),
            *("--master", started.address, "--name", "e0", "--model", MODEL, "--dtype", "float32", "--block-tokens", str(PAGE)),
            *("--deadline-s", "60"),
            log=folder / "sidecar.log",
        )
        try:
            yield Served(url, started.address)
        finally:
            sidecar.stop()


def test_load_and_blocks_of_sglang_are_the_schedulers(served: Served) -> None:
    assert served.shown().report.capacity_tokens == 4096
    tokens = random_tokens(1, BLOCKS * PAGE + 5)
    assert ask(served.engine, COMPLETIONS, body_of({"prompt": tokens, "max_tokens": 2})).status == 200
    until(lambda: served.prefix_blocks(tokens) == BLOCKS, "the prompt's blocks", PATIENCE_S)
    assert ask(served.engine, "/flush_cache", {}).status == 200
    until(lambda: served.shown().engine_blocks == 0, "none, once the cache was cleared", PATIENCE_S)
