"""Mooncake's Python API on kvstore and on Mooncake itself: rows of `make bench-engines`.

Its stress test, in turns: one process with 8 threads on one host, objects of 1 MiB; Mooncake keeps them in that process, kvstore in its
node. Both sides of a ratio are the best of all rounds. And vLLM with its own connector for Mooncake: the time to the first token of a
prompt that another process has computed; Mooncake keeps the blocks in a third process there, over TCP. Medians of several prompts.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benchmarks.engines.stress_child import OBJECT_BYTES, OBJECTS, THREADS
from benchmarks.transfer_peers import MOONCAKE_FOLDER, Trouble, mooncake_python, serving, tool
from kvstore.cli.tools.bench import BenchRow, at_least, at_most
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from tests.engines.live.vllm.engines import Engine, prompt
from tests.ports import free_ports

TURNS: Final = 2
AIM: Final = 2
MAX_HIT_OF_COLD: Final = 0.08
MAX_HIT_OF_MOONCAKE: Final = 0.15
ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "engines" / "mooncake" / "distribution"
DEADLINE_S: Final = 300
PROMPTS: Final = 2
ROUNDS: Final = 5
PROMPT_BLOCKS: Final = 121
"""Of 32 tokens: 3,879 tokens, 30 blocks of 128, 120 MiB of float32."""
OPTIONS: Final[dict[str, Any]] = {"max_model_len": 4096, "block_size": 128, "num_gpu_blocks_override": 128}
STEPS: Final = ("put", "get")


def rows() -> Iterator[BenchRow]:
    """Raises Trouble, where Mooncake cannot be run here."""
    yield from stress_rows()
    yield from vllm_rows()


def stress_rows() -> Iterator[BenchRow]:
    python = mooncake_python()
    rates: dict[str, list[float]] = {"kvstore": [0.0, 0.0], "Mooncake": [0.0, 0.0]}
    with kvstore_master() as ours:
        for _ in range(TURNS):
            note(rates["kvstore"], stress(sys.executable, ours, {"PYTHONPATH": f"{PACKAGE}:{ROOT}"}))
            # A new master each time: for seconds Mooncake's master still places objects in the memory of a process that has ended.
            with mooncake_master() as theirs:
                note(rates["Mooncake"], stress(python, theirs, {"PYTHONPATH": str(ROOT)}))
    for name, found in rates.items():
        for step, rate in zip(STEPS, found, strict=True):
            yield BenchRow(f"{name}: stress test of Mooncake's API, {step} 1 MiB by {THREADS} threads", rate, "GB/s")
    for step, ours_gb_s, theirs_gb_s in zip(STEPS, *rates.values(), strict=True):
        yield at_least(f"kvstore / Mooncake: its stress test, {step}", ours_gb_s / theirs_gb_s, "ratio", AIM)


def stress(python: str, master: str, environment: dict[str, str]) -> list[list[float]]:
    """Seconds of puts and gets of each round."""
    said = tool([python, "-m", "benchmarks.engines.stress_child", master], environment, deadline_s=DEADLINE_S)
    rounds: list[list[float]] = json.loads(said.strip().splitlines()[-1])
    return rounds


def note(best: list[float], rounds: list[list[float]]) -> None:
    """Keep the best rates, in GB/s."""
    moved = THREADS * OBJECTS * OBJECT_BYTES / 1e9
    best[:] = [max(rate, *(moved / seconds[step] for seconds in rounds)) for step, rate in enumerate(best)]


# --- vLLM's connector ---


def vllm_rows() -> Iterator[BenchRow]:
    """For each store one engine computes prompts cold and puts their blocks; then two others, one a store, get them in turns."""
    prompts = [prompt(seed, PROMPT_BLOCKS) for seed in range(PROMPTS)]
    cold_s = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = folder / "engines" / "model"
        tool([sys.executable, "-m", "tests.engines.live.tiny_model", str(model), "small"], {}, deadline_s=DEADLINE_S)
        mooncake_python()
        [package] = (MOONCAKE_FOLDER / "lib").glob("python3*/site-packages/mooncake")
        theirs = stack.enter_context(mooncake_master())
        stack.enter_context(mooncake_segment(theirs))
        environments = {
            "kvstore": configured(folder / "ours", stack.enter_context(kvstore_master()), PACKAGE / "mooncake"),
            "Mooncake": configured(folder / "theirs", theirs, package),
        }
        for store, environment in environments.items():
            with engine(model, environment) as first:
                cold_s[store] = statistics.median(first_token_s(first, asked, is_cached=False) for asked in prompts)
        others = {store: stack.enter_context(engine(model, environment)) for store, environment in environments.items()}
        found: dict[str, list[float]] = {store: [] for store in others}
        for _ in range(ROUNDS):
            for asked in prompts:
                for store, other in others.items():
                    other.forget()
                    found[store].append(first_token_s(other, asked, is_cached=True))
        hits_s = {store: statistics.median(times_s) for store, times_s in found.items()}
    for store, hit_s in hits_s.items():
        yield BenchRow(f"{store}: TTFT by vLLM's own connector, cold", cold_s[store], "s")
        yield BenchRow(f"{store}: TTFT by vLLM's own connector, computed by another process", hit_s, "s")
        yield at_most(f"{store}: TTFT by vLLM's own connector, hit / cold", hit_s / cold_s[store], "ratio", MAX_HIT_OF_COLD)
    ratio = hits_s["kvstore"] / hits_s["Mooncake"]
    yield at_most("kvstore / Mooncake: TTFT of a hit by vLLM's own connector", ratio, "ratio", MAX_HIT_OF_MOONCAKE)


@contextmanager
def engine(model: Path, environment: Mapping[str, str]) -> Iterator[Engine]:
    with mock.patch.dict(os.environ, environment):
        made = Engine(model, store={}, connector=":MooncakeStoreConnector", **OPTIONS)
    with made:
        made.generate(prompt(PROMPTS, 2))  # the first one compiles
        yield made


def first_token_s(engine: Engine, asked: list[int], *, is_cached: bool) -> float:
    [answer] = engine.generate(asked)
    assert bool(answer.cached) is is_cached, answer.cached
    return answer.first_token_s


def configured(folder: Path, master: str, package: Path) -> dict[str, str]:
    """Return the environment in which an engine uses the `mooncake` in `package`, with its libraries, at this master."""
    folder.mkdir()
    for beside in [package, *package.parent.glob("mooncake*.libs")]:
        (folder / beside.name).symlink_to(beside)
    config: dict[str, str | int] = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
    }
    config |= {"mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "512MB"}
    (folder / "mooncake.json").write_text(json.dumps(config))
    return {
        "MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json"),
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@contextmanager
def mooncake_segment(master: str) -> Iterator[None]:
    """A process that has memory for Mooncake's objects, and outlives the engines."""
    setup = f"store.setup('127.0.0.1', 'P2PHANDSHAKE', {2 << 30}, {64 << 20}, 'tcp', '', '{master}')"
    program = "import sys; from mooncake.store import MooncakeDistributedStore as Store; store = Store(); "
    program += f"print({setup}, flush=True); sys.stdin.read()"
    command = [mooncake_python(), "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            while not (line := process.stdout.readline()).startswith("0"):
                if not line:
                    raise Trouble("Mooncake's store was not set up")
            yield
        finally:
            process.stdin.close()
            process.kill()


# --- masters ---


@contextmanager
def kvstore_master() -> Iterator[str]:
    plan = ClusterPlan(dram="3200MiB", is_private=True)
    with LocalCluster(plan, on_log=lambda name, line: print(name, line, file=sys.stderr)) as cluster:
        cluster.wait_warm()
        yield cluster.address


@contextmanager
def mooncake_master() -> Iterator[str]:
    port, metrics = free_ports(2)
    program = str(MOONCAKE_FOLDER / "bin" / "mooncake_master")
    with serving([program, "--rpc_port", str(port), "--metrics_port", str(metrics)], port, {}):
        yield f"127.0.0.1:{port}"


if __name__ == "__main__":
    try:
        for row in rows():
            print(f"{row.name}: {row.value:.3g} {row.unit} {row.aim}")
    except subprocess.TimeoutExpired as error:
        sys.exit(str(error))
