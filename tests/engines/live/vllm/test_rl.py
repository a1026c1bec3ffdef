"""Two servers whose weights are updated in memory, by the commands of docs/rl.md: pause, update, name, resume; and sleep."""

import contextlib
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster
from tests.docs.shell_blocks import ROOT, SHELL, code
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Engine, expected, prompt
from tests.engines.live.vllm.server import Server
from tests.engines.live.vllm.test_weights import TRAINED

BLOCKS: Final = 5
CACHED: Final = BLOCKS * BLOCK_TOKENS
ARGUMENTS: Final = (
    "--worker-extension-cls",
    TRAINED["worker_extension_cls"],
    "--no-enable-prefix-caching",
    "--num-gpu-blocks-override",
    "64",
)
"""Without a prefix cache of their own: what is cached comes from the store."""
LATE: Final = "tests.engines.live.vllm.faults:LateConnector"
"""Its loads are under way when an engine pauses."""
LONG: Final = 200
"""Tokens of an answer that is under way when its engine pauses."""


@pytest.fixture(scope="module")
def servers(model: Path, store: Cluster) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        begun = [Server(model, store.address, *ARGUMENTS, connector=LATE, VLLM_SERVER_DEV_MODE="1") for _ in range(2)]
        for server in begun:
            stack.callback(server.close)
        for server in begun:
            server.wait()
        yield begun


@pytest.fixture(scope="module")
def computing(model: Path) -> Iterator[Engine]:
    with Engine(model, **TRAINED) as engine:
        yield engine


def update(server: Server, seed: int, name: str | None) -> None:
    server.post("/pause?mode=keep")
    server.post("/collective_rpc", {"method": "train", "args": [str(seed)]})
    if name is not None:
        server.post("/update_weight_version", {"new_version": name})
    server.post("/resume")


def update_as_printed(servers: list[Server], seed: int) -> None:
    """Run the commands of docs/rl.md, on both servers."""
    script, *_of_sglang = [block for block in code(ROOT / "docs" / "rl.md", SHELL) if block.startswith("for engine")]
    changes = {"127.0.0.1:8000 127.0.0.1:8001": " ".join(server.address for server in servers)}
    changes |= {"update_from_trainer": "train", '["1"]': f'["{seed}"]', "step-1": f"step-{seed}"}
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    subprocess.run(["bash", "-e", "-c", script], check=True, stdout=subprocess.DEVNULL)


def has_one(server: Server, state: str) -> bool:
    """Return True if exactly one request is in `state`: `running`, or `waiting` while it is loaded."""
    return re.search(rf"^vllm:num_requests_{state}\{{[^}}]*\}} 1\.0$".encode(), server.get("/metrics"), re.MULTILINE) is not None


def is_stored(server: Server, asked: list[int]) -> bool:
    return server.complete(asked).cached == CACHED


class Load:
    """Requests that a server has under way all the time: prompts that it loads, ones that it computes and saves, and long answers."""

    def __init__(self, server: Server, stored: list[int]) -> None:
        self._server = server
        self._stored = stored
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self._running: list[Future[int]] = []

    def __enter__(self) -> "Load":
        self._running = [self._pool.submit(self._run, seed) for seed in range(4)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def check(self) -> None:
        """Raises what a request raised."""
        self._stop.set()
        assert all(future.result(60) for future in self._running)

    def _run(self, seed: int) -> int:
        count = 0
        while not self._stop.is_set():
            asked = self._stored if seed % 2 else prompt(7000 + 100 * seed + count, BLOCKS)
            self._server.complete(asked, count=40)
            count += 1
        return count


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_and_sleep_work_under_load(servers: list[Server], computing: Engine, mode: str) -> None:
    """With requests that run, load and save. Weights stay, so that tokens are those of an engine without a store."""
    server = servers[0]
    asked = prompt(500 + len(mode), BLOCKS)
    right = expected(computing, asked)[0]
    server.complete(asked).check_same(right)
    with Load(server, asked) as load:
        for _ in range(3):
            server.post(f"/pause?mode={mode}")
            server.post("/resume")
        for level in (1, 2):
            server.post(f"/sleep?level={level}&mode={mode}")
            server.post("/wake_up")
        server.post("/collective_rpc", {"method": "reload_weights"})
        load.check()
    server.complete(asked).check_same(right)
    assert "Failed to reset" not in server.log


def test_kept_requests_save_nothing_under_new_weights(servers: list[Server], computing: Engine) -> None:
    """A request that is kept while weights change goes on; another server finds nothing of it under the new name."""
    asked = prompt(520, BLOCKS)
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(servers[0].complete, asked, LONG)
        eventually(partial(has_one, servers[0], "running"), "it runs")
        update(servers[0], 1, "kept-1")
        assert len(kept.result(120).tokens) == LONG
    update(servers[1], 1, "kept-1")
    computing.tell("rpc", method="train", arguments={"seed": 1})
    right = expected(computing, asked)[0]
    servers[1].complete(asked).check_same(right, cached=0)


def test_loading_requests_are_recomputed_after_new_weights(servers: list[Server], computing: Engine) -> None:
    """The blocks that the requests were loading belong to the old weights."""
    asked = prompt(525, BLOCKS)
    servers[0].complete(asked).check_same(expected(computing, asked)[0])
    eventually(partial(is_stored, servers[0], asked), "it is stored")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(servers[0].complete, asked)
        eventually(partial(has_one, servers[0], "waiting"), "it is loaded")
        update(servers[0], 5, "loaded-5")
        update(servers[1], 5, "loaded-5")
        computing.tell("rpc", method="train", arguments={"seed": 5})
        answer = loading.result(120)
    right = expected(computing, asked)[0]
    answer.check_same(right, cached=0)
    eventually(partial(is_stored, servers[1], asked), "it is stored under the new name")
    servers[1].complete(asked).check_same(right)


def test_updates_of_two_engines_interleaved(servers: list[Server], computing: Engine, model: Path, store: Cluster) -> None:
    """Engines of one version share, one that is behind does not, and one that starts from the files shares with none of them."""
    for step in (2, 3):
        asked = prompt(530 + step, BLOCKS)
        behind = expected(computing, asked)[0]
        update(servers[0], step, f"step-{step}")
        computing.tell("rpc", method="train", arguments={"seed": step})
        right = expected(computing, asked)[0]
        assert right.logprobs != behind.logprobs
        servers[0].complete(asked).check_same(right)
        eventually(partial(is_stored, servers[0], asked), "it is stored")
        servers[1].complete(asked).check_same(behind, cached=0)
        update(servers[1], step, f"step-{step}")
        servers[1].complete(asked).check_same(right, cached=CACHED)
    update_as_printed(servers, 4)
    computing.tell("rpc", method="train", arguments={"seed": 4})
    right = expected(computing, asked)[0]
    servers[0].complete(asked).check_same(right)
    eventually(partial(is_stored, servers[1], asked), "both have the weights of that name")
    servers[1].complete(asked).check_same(right)
    with Engine(model) as plain, Engine(model, store={"master": store.address, "lookup_deadline_s": 30}) as fresh:
        (right,) = plain.generate(asked)
        fresh.generate(asked)[0].check_same(right, cached=0)
