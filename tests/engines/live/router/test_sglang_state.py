"""A real SGLang server as the scheduler sees it: its load, its blocks, and a cache that was cleared."""

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import Placement, SchedulerClient
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol import control_pb2 as pb
from tests.client.processes import Process, cluster
from tests.engines.live import process_group
from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.router.fleet import MODEL, PATIENCE_S, connection
from tests.engines.live.sglang.hicache import path
from tests.engines.live.tiny_model import make
from tests.ports import free_ports
from tests.system.running import until

PAGE: Final = 16
BLOCKS: Final = 6
FLAGS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.6", "--max-total-tokens", "4096"),
    *("--context-length", "1024", "--page-size", str(PAGE), "--skip-server-warmup", "--host", "127.0.0.1", "--enable-metrics"),
)


@dataclass
class Served:
    engine: str
    master: str

    def post(self, path: str, body: object) -> None:
        with contextlib.closing(connection(self.engine)) as asked:
            asked.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = asked.getresponse()
            assert response.status == 200, response.read()

    def shown(self) -> pb.InstanceStatus:
        with SchedulerClient(ClientSettings(master=self.master, deadline_s=PATIENCE_S)) as client:
            [found] = client.instances().instances
            return found

    def prefix_blocks(self, tokens: list[int]) -> int:
        keys = Namespace(model=MODEL, dtype="float32", block_tokens=PAGE).block_keys(tokens)
        with SchedulerClient(ClientSettings(master=self.master, deadline_s=PATIENCE_S)) as client:
            placed = client.schedule(keys, block_tokens=PAGE, input_tokens=len(tokens))
        assert isinstance(placed, Placement)
        return placed.prefix_blocks


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a sidecar that the scheduler knows."""
    folder, model = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("model")
    make(model, "tiny")
    port, events, replay = free_ports(3)
    publishing = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    environment = {**os.environ, **path(), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    command = [str(python_of("sglang")), "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", MODEL]
    command += ["--port", str(port), *FLAGS, "--kv-events-config", json.dumps(publishing)]
    log, url = folder / "sglang.log", f"http://127.0.0.1:{port}"
    with log.open("ab") as output, cluster(folder, "--report-interval-s", "0.1") as started:
        server = process_group.start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            until(lambda: server.poll() is not None or is_ready(url), "SGLang serves", PATIENCE_S, every_s=0.2)
            assert server.poll() is None, log.read_text(errors="replace")
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
        finally:
            process_group.end(server)


def is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), contextlib.closing(connection(url)) as asked:
        asked.request("GET", "/health")
        return asked.getresponse().status == 200
    return False


def test_load_and_blocks_of_sglang_are_the_schedulers(served: Served) -> None:
    assert served.shown().report.capacity_tokens == 4096
    numbers = random.Random(1)
    tokens = [numbers.randrange(3, 1000) for _ in range(BLOCKS * PAGE + 5)]
    served.post("/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": 2, "temperature": 0})
    until(lambda: served.prefix_blocks(tokens) == BLOCKS, "the prompt's blocks", PATIENCE_S)
    served.post("/flush_cache", {})
    until(lambda: served.shown().engine_blocks == 0, "none, once the cache was cleared", PATIENCE_S)
