"""vLLM engines for tests: each a process in vLLM's own environment, which answers many questions, for it takes long to start."""

import itertools
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from tests.client.processes import Cluster
from tests.engines.live.child import EngineChild
from tests.engines.live.environments import ROOT

DRIVER: Final = Path(__file__).with_name("driver.py")
NUMBERS: Final = itertools.count()
BLOCK_TOKENS: Final = 32
"""The smallest that vLLM has on a CPU."""
PATIENT: Final[dict[str, Any]] = {"lookup_deadline_s": 30, "load_deadline_s": 60}
"""Long deadlines: a slow machine must not turn a hit into a miss."""
CONNECTOR: Final = "kvstore.engines.vllm.connector:KVStoreConnector"
SAME_LOGPROB: Final = 1e-4
"""Of one token by two ways in float32: kernels add in another order where a batch is of another shape."""


@dataclass(frozen=True)
class Answer:
    """An engine's answer to one prompt."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    """Tokens of the prompt that it did not compute."""
    first_token_s: float

    def check_same(self, other: "Answer", *, cached: int | None = None) -> None:
        """Raises AssertionError unless both made the same of the prompt, this one with so many tokens `cached`, if that is given."""
        assert self.tokens == other.tokens
        assert self.logprobs == pytest.approx(other.logprobs, abs=SAME_LOGPROB)
        assert cached is None or self.cached == cached


def check_all(answers: list[Answer], right: list[Answer], *, cached: int | None = None) -> None:
    """`check_same` of each prompt."""
    for answer, wanted in zip(answers, right, strict=True):
        answer.check_same(wanted, cached=cached)


def variables() -> dict[str, str]:
    """Of the environment of an engine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "",  # else each engine compiles all of torch and vLLM again, for a minute
    }


def transfer_to(store: dict[str, Any], connector: str = CONNECTOR, role: str = "kv_both") -> dict[str, Any]:
    """Configuration of the connector MODULE:CLASS, or :CLASS of vLLM's own, with these settings."""
    module, _, name = connector.partition(":")
    return {
        "kv_connector": name,
        "kv_connector_module_path": module or None,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": store,
    }


class Engine:
    """A context manager: an engine that is ready inside."""

    def __init__(
        self,
        model: Path,
        *,
        store: dict[str, Any] | None = None,
        connector: str = CONNECTOR,
        transfer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`store`: settings of the connector MODULE:CLASS, or :CLASS of vLLM's own; `transfer`: a whole configuration in place of that.
        `options` are arguments of `vllm.LLM`."""
        options = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": 64,
        } | options
        if store is not None:
            transfer = transfer_to(store, connector)
        if transfer is not None:
            options["kv_transfer_config"] = transfer
        has_ranks = {"tensor_parallel_size", "pipeline_parallel_size"} & options.keys()
        environment = variables() | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Ranks are processes; vLLM would have a NUMA node for each.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if has_ranks else "auto",
        }
        self._log = model.with_name(f"engine-{next(NUMBERS)}.log")
        self._child = EngineChild("vllm", DRIVER, json.dumps(options), log=self._log, environment=environment)

    def generate(self, *prompts: list[int], tokens: int = 8, adapter: Path | None = None, **each: Sequence[object] | None) -> list[Answer]:
        """Of prompts that are there at once. `adapter`: the folder of a LoRA. `salts`, `images`, `hints`: of each, see the driver."""
        self.begin(*prompts, tokens=tokens, adapter=adapter, **each)
        return self.answers()

    def begin(self, *prompts: list[int], tokens: int = 8, adapter: Path | None = None, **each: Sequence[object] | None) -> None:
        """As `generate`, for a test that takes the `answers` later."""
        self._child.begin("generate", prompts=prompts, tokens=tokens, adapter=adapter and str(adapter), **each)

    def answers(self) -> list[Answer]:
        return [Answer(**answer) for answer in self._child.answer()]

    def forget(self) -> None:
        """Its own prefix cache, so that it must ask the store."""
        assert self.tell("reset")

    def save(self, *prompts: list[int], **how: Any) -> list[Answer]:
        """Have it compute prompts, or load them, whose blocks are in the store then."""
        answers = self.generate(*prompts, **how)
        self.flush()
        return answers

    def flush(self) -> None:
        """Wait until all saved blocks are committed in the store."""
        error = self.tell("flush")
        assert not error, error

    def tell(self, command: str, **arguments: Any) -> Any:
        """Send a command to the driver and return its response."""
        return self._child.ask(command, **arguments)

    def log_lines(self, text: str) -> list[str]:
        """Lines of its log so far that hold `text`."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if text in line]

    def __enter__(self) -> Self:
        self._child.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._child.close()


def prompt(seed: int, blocks: int = 5) -> list[int]:
    """Tokens of so many blocks and a few more: other ones for each seed."""
    return random_tokens(seed, blocks * BLOCK_TOKENS + 7)


def random_tokens(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 1000) for _ in range(count)]


def expected(plain: Any, *prompts: list[int], **how: Any) -> list[Answer]:
    """Return the answers of an engine that has to compute the prompts."""
    plain.forget()
    answers: list[Answer] = plain.generate(*prompts, **how)
    return answers


def start_node(store: Cluster) -> None:
    """The store's node, after the first time with the name and the NVMe that it had."""
    store.start_node("--name", "n", "--dram", "32MiB", "--nvme", f"{store.folder / 'nvme'}:128MiB")
