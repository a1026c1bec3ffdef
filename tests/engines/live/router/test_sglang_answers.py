"""Requests to kvstore-router and to SGLang itself, on a CPU: the answers are equal in every field, and its /tokenize is exact."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, Role, SchedulerClient
from kvstore.client.instances.reporter import Reporter
from tests.client.processes import Process, cluster
from tests.engines.live import process_group
from tests.engines.live.environments import ROOT, python_of
from tests.engines.live.router.comparing import Reply, ask
from tests.engines.live.router.fleet import MODEL, PATIENCE_S, connection
from tests.engines.live.router.kinds import KINDS
from tests.engines.live.sglang.hicache import path
from tests.engines.live.tiny_model import make
from tests.ports import free_ports
from tests.system.running import until

PAGE: Final = 16
FLAGS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.6", "--max-total-tokens", "4096"),
    *("--context-length", "1024", "--page-size", str(PAGE), "--tool-call-parser", "qwen25", "--enable-cache-report"),
    *("--skip-server-warmup", "--served-model-name", MODEL, "--host", "127.0.0.1"),
)
REFUSED: Final = {"chat bad format": "load; tokenize"}
"""Kinds that SGLang's /tokenize refuses, and vLLM's does not."""


@contextlib.contextmanager
def sglang(model: Path, log: Path) -> Iterator[str]:
    """The URL of a server that is ready."""
    (port,) = free_ports(1)
    environment = {**os.environ, **path(), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    command = [str(python_of("sglang")), "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port), *FLAGS]
    with log.open("ab") as output:
        server = process_group.start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: server.poll() is not None or is_ready(url), "SGLang serves", PATIENCE_S)
        assert server.poll() is None, log.read_text(errors="replace")
        yield url
    finally:
        process_group.end(server)


def is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), contextlib.closing(connection(url)) as asked:
        asked.request("GET", "/health")
        return asked.getresponse().status == 200
    time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The router's and the engine's."""
    folder, model = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("model")
    make(model, "tiny")
    with sglang(model, folder / "sglang.log") as engine, cluster(folder) as started:
        report = InstanceReport(name="e0", role=Role.BOTH, address=engine, capacity_tokens=4096)
        with SchedulerClient(ClientSettings(master=started.address)) as client, Reporter(client, lambda: report):
            flags = ("--listen", "127.0.0.1:0", "--master", started.address, "--model", MODEL, "--block-tokens", str(PAGE))
            router = Process("tests.tuned_daemon", "kvstore-router", *flags, "--tokenize-timeout-s", "60", log=folder / "router.log")
            try:
                url = f"http://{router.ready['listen']}"
                through(url, "/v1/completions", {"prompt": "Hi", "max_tokens": 1})
                yield url, engine
            finally:
                router.stop()


def through(url: str, path: str, members: dict[str, Any]) -> Reply:
    """By the router. Asked again, as clients do, while it has no engine."""
    found: list[Reply] = []

    def answers() -> bool:
        found.append(ask(url, path, {"model": MODEL, "temperature": 0, **members}))
        return found[-1].status not in (429, 503)

    until(answers, "an answer of the router", PATIENCE_S)
    return found[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_answers_as_sglang_does(urls: tuple[str, str], kind: str) -> None:
    router, engine = urls
    members, where = KINDS[kind][1], KINDS[kind][0]
    for _ in range(2):
        expected = ask(engine, where, {"model": MODEL, "temperature": 0, **members})
    routed = through(router, where, members)
    assert (routed.status, routed.content_type) == (expected.status, expected.content_type)
    assert routed.body == expected.body
    assert routed.headers["x-kvstore-routed-by"] == REFUSED.get(kind, KINDS[kind][2])


def test_every_prompt_was_tokenised_as_sglang_did(urls: tuple[str, str]) -> None:
    """After all of the above."""
    assert ask(urls[0], "/stats", None, method="GET").body["token_mismatches"] == 0
