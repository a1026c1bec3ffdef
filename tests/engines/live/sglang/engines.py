"""Whole SGLang engines on a CPU for tests: each a process in SGLang's own environment, which answers many questions, for it takes long to
start."""

import itertools
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvstore.testing.transfer.awaited import eventually
from tests.engines.live.child import EngineChild
from tests.engines.live.environments import ROOT
from tests.engines.live.sglang.hicache import FOLDER, VANISHING, extra_config, path
from tests.engines.live.vllm.engines import Answer, random_tokens

PAGE: Final = 16
"""Tokens."""
LOSING: Final = {"module_path": "tests.engines.live.sglang.faults", "class_name": "LosingHiCache"}
PATIENT: Final = {"lookup_deadline_s": 30, "load_deadline_s": 60}
"""Long deadlines: a slow machine must not turn a hit into a miss."""
NUMBERS: Final = itertools.count()


class Engine:
    """A context manager: an engine that is ready inside."""

    def __init__(self, model: Path, *, store: dict[str, Any] | None = None, lora: Path | None = None, **options: Any) -> None:
        """`store`: entries of the back end's extra configuration, None for an engine with its own memory only; `lora`: an adapter."""
        options["model_path"] = str(model)
        if store is not None:
            settings: dict[str, Any] = {"prefetch_threshold": PAGE, "model": "tiny"} | LOSING | store
            options["hicache_storage_backend"] = "dynamic"
            options["hicache_storage_backend_extra_config"] = json.dumps(extra_config(**settings))
        if lora is not None:
            options |= {"lora_paths": {"lora": str(lora)}, "lora_backend": "torch_native", "max_loras_per_batch": 2}
        number = next(NUMBERS)
        self._vanishing = model.with_name(f"vanishing-{number}")
        page_memory = path()
        page_memory["PYTHONPATH"] = os.pathsep.join([page_memory["PYTHONPATH"], str(ROOT)])
        environment = page_memory | {"HF_HUB_OFFLINE": "1", VANISHING: str(self._vanishing), "PYTHONDONTWRITEBYTECODE": ""}
        log = model.with_name(f"sglang-{number}.log")
        self._child = EngineChild("sglang", FOLDER / "engine_child.py", json.dumps(options), log=log, environment=environment)

    def generate(self, *prompts: list[int], tokens: int = 8, **more: Any) -> list[Answer]:
        """Of prompts that are there at once; `salt`, `lora` and `priority` of all of them."""
        self.begin(*prompts, tokens=tokens, **more)
        return self.answers()

    def begin(self, *prompts: list[int], tokens: int = 8, **more: Any) -> None:
        """As `generate`, for a test that takes the `answers` later."""
        self._child.begin("generate", prompts=prompts, tokens=tokens, **more)

    def answers(self) -> list[Answer]:
        return [Answer(first_token_s=0.0, **answer) for answer in self._child.answer()]

    def forget(self) -> None:
        """Clear the engine's own pools, after its writes to the store have ended."""
        eventually(lambda: bool(self._child.ask("forget")), "the engine is idle")

    def flush(self) -> None:
        """Wait for the engine's writes to the store, by `forget`."""
        self.forget()

    def save(self, *prompts: list[int], **how: Any) -> list[Answer]:
        """Compute or load the prompts, and wait until their pages are in the store."""
        answers = self.generate(*prompts, **how)
        self.flush()
        return answers

    def update(self, folder: Path, how: str, **more: Any) -> None:
        """Load other weights into it; `version` and `flush`."""
        success, text = self._child.ask("update", folder=str(folder), how=how, **more)
        assert success, text

    def clear(self) -> bool:
        """Order it to clear the storage: what it answers."""
        return bool(self._child.ask("clear"))

    def metrics(self) -> dict[str, float]:
        """The back end's counters."""
        return dict(self._child.ask("metrics"))

    @property
    def log(self) -> str:
        return self._child.log

    def lose(self, *page_memory: int) -> None:
        """These pages of the next read vanish before it."""
        self._vanishing.write_text(json.dumps(page_memory))

    def __enter__(self) -> Self:
        self._child.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._child.close()


def prompt(seed: int, pages: int = 12) -> list[int]:
    """Tokens of so many pages and a few more: other ones for each seed."""
    return random_tokens(seed, pages * PAGE + 7)
