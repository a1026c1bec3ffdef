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
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benchmarks.mooncake_stress_child import OBJECT_BYTES, OBJECTS, THREADS
from benchmarks.transfer_peers import MOONCAKE_FOLDER, Trouble, mooncake_python, serving, tool
from kvstore.client.tools.bench_report import Row, at_least, at_most
from kvstore.client.tools.cluster import Cluster, ClusterPlan
from tests.engines.live.vllm.engines import Engine, prompt
from tests.ports import free_ports

TURNS: Final = 2
AIM: Final = 2
MAX_HIT_OF_COLD: Final = 0.08
MAX_HIT_OF_MOONCAKE: Final = 0.15
ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "engines" / "mooncake" / "distribution"
DEADLINE_S: Final = 300
PROMPTS: Final = 3
PROMPT_BLOCKS: Final = 121
"""Of 32 tokens: 3,879 tokens, 30 blocks of 128, 120 MiB of float32."""
OPTIONS: Final[dict[str, Any]] = {"max_model_len": 4096, "block_size": 128, "num_gpu_blocks_override": 128}
STEPS: Final = ("put", "get")


def rows() -> Iterator[Row]:
    """Raises Trouble, where Mooncake cannot be run here."""
    yield from stress_rows()
    yield from vllm_rows()


def stress_rows() -> Iterator[Row]:
    python = mooncake_python()
    rates: dict[str, list[float]] = {"kvstore": [0.0, 0.0], "Mooncake": [0.0, 0.0]}
    with kvstore_master() as ours, mooncake_master() as theirs:
        for _ in range(TURNS):
            note(rates["kvstore"], stress(sys.executable, ours, {"PYTHONPATH": f"{PACKAGE}:{ROOT}"}))
            note(rates["Mooncake"], stress(python, theirs, {"PYTHONPATH": str(ROOT)}))
    for name, found in rates.items():
        for step, rate in zip(STEPS, found, strict=True):
            yield Row(f"{name}: stress test of Mooncake's API, {step} 1 MiB by {THREADS} threads", rate, "GB/s")
    for step, ours_gb_s, theirs_gb_s in zip(STEPS, *rates.values(), strict=True):
        yield at_least(f"kvstore / Mooncake: its stress test, {step}", ours_gb_s / theirs_gb_s, "ratio", AIM)


def stress(python: str, master: str, environment: dict[str, str]) -> list[list[float]]:
    """Seconds of puts and gets of each round."""
    said = tool([python, "-m", "benchmarks.mooncake_stress_child", master], environment, deadline_s=DEADLINE_S)
    rounds: list[list[float]] = json.loads(said.strip().splitlines()[-1])
    return rounds


def note(best: list[float], rounds: list[list[float]]) -> None:
    """Keep the best rates, in GB/s."""
    moved = THREADS * OBJECTS * OBJECT_BYTES / 1e9
    best[:] = [max(rate, *(moved / seconds[step] for seconds in rounds)) for step, rate in enumerate(best)]


# --- vLLM's connector ---


def vllm_rows() -> Iterator[Row]:
    """An engine computes prompts cold and puts their blocks, and another one gets them; first with kvstore, then with Mooncake."""
    hits = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "engines" / "model"
        tool([sys.executable, "-m", "tests.engines.live.tiny_model", str(model), "small"], {}, deadline_s=DEADLINE_S)
        with kvstore_master() as ours:
            hits["kvstore"] = yield from first_tokens("kvstore", model, configured(folder / "ours", ours, PACKAGE / "mooncake"))
        mooncake_python()
        [package] = (MOONCAKE_FOLDER / "lib").glob("python3*/site-packages/mooncake")
        with mooncake_master() as theirs, mooncake_segment(theirs):
            hits["Mooncake"] = yield from first_tokens("Mooncake", model, configured(folder / "theirs", theirs, package))
    name = "kvstore / Mooncake: TTFT by vLLM's own connector, computed by another process"
    yield at_most(name, hits["kvstore"] / hits["Mooncake"], "ratio", MAX_HIT_OF_MOONCAKE)


def first_tokens(name: str, model: Path, environment: Mapping[str, str]) -> Generator[Row, None, float]:
    """The median of what another process computed."""
    prompts = [prompt(seed, PROMPT_BLOCKS) for seed in range(PROMPTS)]
    medians = []
    with mock.patch.dict(os.environ, environment):
        for kind in ("cold", "computed by another process"):
            with Engine(model, store={}, connector=":MooncakeStoreConnector", **OPTIONS) as engine:
                engine.generate(prompt(PROMPTS, 2))  # the first one compiles
                answers = [engine.generate(asked)[0] for asked in prompts]
            assert all(bool(answer.cached) is (kind != "cold") for answer in answers), [answer.cached for answer in answers]
            medians.append(statistics.median(answer.first_token_s for answer in answers))
            yield Row(f"{name}: TTFT by vLLM's own connector, {kind}", medians[-1], "s")
    yield at_most(
        f"{name}: TTFT by vLLM's own connector, computed by another process / cold", medians[1] / medians[0], "ratio", MAX_HIT_OF_COLD
    )
    return medians[1]


def configured(folder: Path, master: str, package: Path) -> dict[str, str]:
    """What has an engine use the `mooncake` in `package`, and whatever came with it, at this master."""
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
    with Cluster(plan, on_log=lambda name, line: print(name, line, file=sys.stderr)) as cluster:
        cluster.wait_ready()
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
