"""Weights that change below an engine: what it and others load is of the weights that compute it, or nothing is loaded."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvstore.engines.vllm.checkpoint import WATCH_S
from tests.client.processes import Cluster
from tests.engines.live.environments import ROOT
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, expected, prompt

BLOCKS: Final = 5
CACHED: Final = BLOCKS * BLOCK_TOKENS
TRAINED: Final[dict[str, Any]] = {"worker_extension_cls": "tests.engines.live.vllm.trainer.Trainer"}


def overwrite(model: Path, seed: int) -> None:
    """Other weights in place of those of the model."""
    subprocess.run([sys.executable, "-m", "tests.engines.live.tiny_model", model, "weights", str(seed)], cwd=ROOT, check=True)


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture(scope="module")
def computing(model: Path) -> Iterator[Engine]:
    """Without a store, and trained as others are."""
    with Engine(model, **TRAINED) as engine:
        yield engine


def check_cached(engine: Engine, right: Engine, asked: list[int], cached: int) -> None:
    """`engine` has loaded so many tokens, and makes what `right` makes, which computes all."""
    (wanted,) = expected(right, asked)
    engine.forget()
    engine.save(asked)[0].check_same(wanted, cached=cached)


def test_weights_overwritten_in_place_are_others(own_model: Path, store: Cluster) -> None:
    """Noticed while the engine runs; known by their bytes once it has loaded them, and to an engine that starts from them."""
    settings = PATIENT | {"master": store.address}
    with Engine(own_model) as computing, Engine(own_model, store=settings) as engine:
        started = engine.tell("weights")
        check_cached(engine, computing, prompt(7400), 0)
        check_cached(engine, computing, prompt(7400), CACHED)
        overwrite(own_model, 1)
        time.sleep(2 * WATCH_S)
        check_cached(engine, computing, prompt(7400), 0)
        assert engine.tell("weights").startswith(f"{started}@~private-")
        for running in (engine, computing):
            running.tell("rpc", method="reload_weights")
        assert "@" not in engine.tell("weights") != started
        check_cached(engine, computing, prompt(7400), 0)
        with Engine(own_model, store=settings) as fresh:
            check_cached(fresh, computing, prompt(7400), CACHED)


def test_updates_in_memory_are_shared_by_name(model: Path, store: Cluster, computing: Engine) -> None:
    settings = PATIENT | {"master": store.address}
    with Engine(model, store=settings, **TRAINED) as one, Engine(model, store=settings, **TRAINED) as other:
        files = one.tell("weights")
        check_cached(one, computing, prompt(7410), 0)
        check_cached(other, computing, prompt(7410), CACHED)
        for engine in (one, computing):
            engine.tell("rpc", method="train", arguments={"seed": 1})
        assert one.tell("weights").startswith(f"{files}@~private-")
        check_cached(one, computing, prompt(7410), 0)
        check_cached(one, computing, prompt(7410), CACHED)  # its own, of this version
        one.tell("name", version="step-1")
        assert one.tell("weights") == f"{files}@step-1"
        check_cached(one, computing, prompt(7410), 0)
        assert one.tell("reset", connector=True)
        other.tell("rpc", method="train", arguments={"seed": 1})
        other.tell("name", version="step-1")
        check_cached(other, computing, prompt(7410), CACHED)
        check_cached(one, computing, prompt(7410), 0)  # it was reset, and has not been named since
        for level, cached in ((1, CACHED), (2, 0)):
            other.tell("sleep", level=level)
            other.tell("wake")
            check_cached(other, computing, prompt(7410), cached)
        other.tell("rpc", method="reload_weights")
        assert other.tell("weights") == files
