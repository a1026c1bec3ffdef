"""Real vLLM engines with a real store: prefixes are found by other processes, and what comes of a prompt is what comes without a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.processes import Cluster, cluster
from tests.engines.live.tiny_model import make
from tests.engines.live.vllm.engines import BLOCK_TOKENS, Answer, Engine, prompt

LOSING = "tests.engines.live.vllm.faults:LosingConnector"
BLOCKS = 5
CACHED = BLOCKS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make(folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("store")
    with cluster(folder) as started:
        started.start_node("--dram", "64MiB", "--nvme", f"{folder / 'nvme'}:256MiB")
        yield started


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Engine]:
    """Without a store: what the others are held to."""
    with Engine(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def waiting(model: Path, store: Cluster) -> Iterator[Engine]:
    """Its steps wait for what they load."""
    with Engine(model, store={"master": store.address, "load_async": False}, connector=LOSING) as engine:
        yield engine


@pytest.fixture(scope="module")
def loading(model: Path, store: Cluster) -> Iterator[Engine]:
    """Loads between its steps."""
    with Engine(model, store={"master": store.address}, connector=LOSING) as engine:
        yield engine


def expected(plain: Engine, *prompts: list[int], tokens: int = 8) -> list[Answer]:
    plain.forget()
    return plain.generate(*prompts, tokens=tokens)


def test_a_prompt_that_one_engine_computed_is_another_s(plain: Engine, waiting: Engine, loading: Engine) -> None:
    asked = prompt(1)
    (right,) = expected(plain, asked)
    (cold,) = waiting.generate(asked)
    cold.check_same(right)
    assert cold.cached == 0
    waiting.tell("flush")
    waiting.forget()
    for engine in (waiting, loading):
        (warm,) = engine.generate(asked)
        warm.check_same(right)
        assert warm.cached == CACHED
