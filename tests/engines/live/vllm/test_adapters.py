"""LoRAs: blocks that one of them made are for requests of its name only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.processes import Cluster
from tests.engines.live.vllm.conftest import make_model
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, prompt

BLOCKS = 5
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """vLLM calls each as its folder."""
    made = [make_model(tmp_path_factory, "adapter", seed) for seed in ("1", "2")]
    return [folder.rename(folder.with_name(f"adapter-{number}")) for number, folder in enumerate(made)]


@pytest.fixture(scope="module")
def computing(model: Path) -> Iterator[Engine]:
    with Engine(model, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def sharing(model: Path, store: Cluster) -> Iterator[Engine]:
    with Engine(model, store=PATIENT | {"master": store.address}, **OPTIONS) as engine:
        yield engine


def test_what_one_adapter_made_no_other_and_not_the_model_takes_for_its_own(
    adapters: list[Path], computing: Engine, sharing: Engine
) -> None:
    asked = prompt(200, BLOCKS)
    answers = []
    for adapter in (*adapters, None):
        (right,) = computing.generate(asked, adapter=adapter)
        (answer,) = sharing.generate(asked, adapter=adapter)
        answer.check_same(right)
        assert answer.cached == 0
        answers.append(right)
        sharing.flush()
        sharing.forget()
    assert len({tuple(answer.logprobs) for answer in answers}) == len(answers), "each makes something else of it"
    for adapter, right in zip((*adapters, None), answers, strict=True):
        (answer,) = sharing.generate(asked, adapter=adapter)
        answer.check_same(right)
        assert answer.cached == BLOCKS * BLOCK_TOKENS
        sharing.forget()
