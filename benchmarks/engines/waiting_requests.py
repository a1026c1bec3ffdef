"""Lookups of requests that wait in vLLM's queue: rows of `make bench-engines`.

RUNNING requests fill the engine's blocks, WAITING others wait for theirs. The store has the first half of each prompt.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvstore.cli.tools.bench import BenchRow
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from tests.engines.live.environments import ROOT
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Engine, random_tokens

RUNNING: Final = 2
WAITING: Final = 8
PROMPT_BLOCKS: Final = 16
MADE_TOKENS: Final = 200
POOL_BLOCKS: Final = RUNNING * (PROMPT_BLOCKS + MADE_TOKENS // BLOCK_TOKENS + 2) + 1
CONNECTOR: Final = "benchmarks.engines.timed_connector:TimedConnector"


def rows() -> Iterator[BenchRow]:
    prompts = [random_tokens(seed, PROMPT_BLOCKS * BLOCK_TOKENS + 7) for seed in range(RUNNING + WAITING)]
    halves = [prompt[: PROMPT_BLOCKS // 2 * BLOCK_TOKENS + 1] for prompt in prompts]
    plan = ClusterPlan(dram="256MiB", is_private=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(plan, on_log=lambda name, line: print(name, line, file=sys.stderr)) as running,
    ):
        running.wait_warm()
        model = Path(folder, "model")
        subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", model, "tiny"], cwd=ROOT, check=True)
        options: dict[str, Any] = {"num_gpu_blocks_override": POOL_BLOCKS, "max_num_seqs": RUNNING + WAITING}
        with Engine(model, store={"master": running.address}, connector=CONNECTOR, **options) as engine:
            for half in halves:
                engine.generate(half, tokens=1)
            engine.flush()
            engine.forget()
            before = engine.tell("timed")
            begin_s = time.perf_counter()
            engine.generate(*prompts, tokens=MADE_TOKENS)
            seconds = time.perf_counter() - begin_s
            after = engine.tell("timed")
    total = {name: after[name] - before[name] for name in after}
    yield BenchRow(f"vLLM: {WAITING} requests wait for blocks, time until all are answered", seconds, "s")
    yield BenchRow("vLLM: the same, calls of its scheduler", total["calls"], "")
    yield BenchRow("vLLM: the same, lookups sent", total["messages"], "")
    yield BenchRow("vLLM: the same, the scheduler's time for lookups", total["seconds"] * 1e3, "ms")
