"""Cost to an engine of saving its whole KV cache: rows of `make bench-engines`.

Two vLLM servers of one model, one without a connector and one with kvstore's, take turns. Both get the same new prompts at once, and
generate equally many tokens for each. No block is found in the store; all are saved. The ratio is the median of the turns' ratios.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.engines.vllm import cluster
from kvstore.cli.tools.bench import BenchRow, at_least
from tests.engines.live.environments import ROOT
from tests.engines.live.vllm.engines import Engine, random_tokens

TURNS: Final = 7
AT_ONCE: Final = 8
PROMPT_TOKENS: Final = 500
OUTPUT_TOKENS: Final = 64
WARM_UP: Final = 2
MIN_SHARE: Final = 0.97
OPTIONS: Final[dict[str, Any]] = {"max_model_len": 1024, "block_size": 128, "num_gpu_blocks_override": 128}


def rows() -> Iterator[BenchRow]:
    with tempfile.TemporaryDirectory() as folder, cluster() as running:
        running.wait_warm()
        model = Path(folder, "model")
        subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", model, "small"], cwd=ROOT, check=True)
        with Engine(model, **OPTIONS) as alone, Engine(model, store={"master": running.address}, **OPTIONS) as saving:
            for turn in range(WARM_UP):
                tokens_per_s(alone, -1 - turn)
                tokens_per_s(saving, -1 - turn)
            pairs = []
            for turn in range(TURNS):
                first, second = (alone, saving) if turn % 2 else (saving, alone)
                rates = {first: tokens_per_s(first, turn), second: tokens_per_s(second, turn)}
                pairs.append((rates[alone], rates[saving]))
            saving.flush()
    yield BenchRow("vLLM: tokens generated, without a connector", statistics.median(rate for rate, _ in pairs), "tokens/s")
    yield BenchRow("vLLM: tokens generated, all blocks saved", statistics.median(rate for _, rate in pairs), "tokens/s")
    share = statistics.median(saved / plain for plain, saved in pairs)
    yield at_least("vLLM: tokens generated, all blocks saved / without a connector", share, "ratio", MIN_SHARE)


def tokens_per_s(engine: Engine, turn: int) -> float:
    prompts = [random_tokens(1000 + turn * AT_ONCE + at, PROMPT_TOKENS) for at in range(AT_ONCE)]
    begin_s = time.perf_counter()
    answers = engine.generate(*prompts, tokens=OUTPUT_TOKENS)
    took_s = time.perf_counter() - begin_s
    assert not any(answer.cached for answer in answers), [answer.cached for answer in answers]
    return sum(len(answer.tokens) for answer in answers) / took_s
