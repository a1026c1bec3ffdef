"""LoRAs: blocks that one of them made are for requests of its name and contents only."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.engines.vllm.variants import CHECK_S
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


def test_adapter_of_one_name_and_path_with_other_contents_is_another(
    model: Path, store: Cluster, adapters: list[Path], computing: Engine, sharing: Engine, tmp_path: Path
) -> None:
    """Unknown while the engine has the one and the files are the other; known again once it has read them, and to an engine that starts."""
    asked = prompt(201, BLOCKS)
    rights = [computing.generate(asked, adapter=adapter)[0] for adapter in adapters]
    changing = Path(shutil.copytree(adapters[0], tmp_path / "changing"))
    for cached in (0, BLOCKS * BLOCK_TOKENS):
        (answer,) = sharing.generate(asked, adapter=changing)
        answer.check_same(rights[0])
        assert answer.cached == cached
        sharing.flush()
        sharing.forget()
    shutil.copytree(adapters[1], changing, dirs_exist_ok=True)
    time.sleep(CHECK_S)
    (answer,) = sharing.generate(asked, adapter=changing)
    answer.check_same(rights[0])
    assert answer.cached == 0
    sharing.forget()
    assert sharing.tell("load_in_place", adapter=str(changing))
    for cached in (0, BLOCKS * BLOCK_TOKENS):
        (answer,) = sharing.generate(asked, adapter=changing)
        answer.check_same(rights[1])
        assert answer.cached == cached
        sharing.flush()
        sharing.forget()
    with Engine(model, store=PATIENT | {"master": store.address}, **OPTIONS) as fresh:
        (answer,) = fresh.generate(asked, adapter=changing)
        answer.check_same(rights[1])
        assert answer.cached == BLOCKS * BLOCK_TOKENS
