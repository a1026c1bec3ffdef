"""Blocks that are for some requests only.

Those that a LoRA made are for requests of its name and contents. Tokens that stand for an image are the same for all; their blocks are for
prompts with that very image.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.engines.vllm.variants import CHECK_S
from tests.client.processes import Cluster
from tests.engines.live.conftest import make_model
from tests.engines.live.pictures import IMAGE_TOKENS
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


def test_blocks_of_an_adapter_are_not_shared_with_others(adapters: list[Path], computing: Engine, sharing: Engine) -> None:
    asked = prompt(200, BLOCKS)
    answers = []
    for adapter in (*adapters, None):
        (right,) = computing.generate(asked, adapter=adapter)
        (answer,) = sharing.generate(asked, adapter=adapter)
        answer.check_same(right, cached=0)
        answers.append(right)
        sharing.flush()
        sharing.forget()
    assert len({tuple(answer.logprobs) for answer in answers}) == len(answers), "each makes something else of it"
    for adapter, right in zip((*adapters, None), answers, strict=True):
        sharing.generate(asked, adapter=adapter)[0].check_same(right, cached=BLOCKS * BLOCK_TOKENS)
        sharing.forget()


def test_adapter_with_other_contents_has_other_blocks(
    model: Path, store: Cluster, adapters: list[Path], computing: Engine, sharing: Engine, tmp_path: Path
) -> None:
    """Unknown while the engine has the one and the files are the other; known again once it has read them, and to an engine that starts."""
    asked = prompt(201, BLOCKS)
    rights = [computing.generate(asked, adapter=adapter)[0] for adapter in adapters]
    changing = Path(shutil.copytree(adapters[0], tmp_path / "changing"))
    for cached in (0, BLOCKS * BLOCK_TOKENS):
        sharing.save(asked, adapter=changing)[0].check_same(rights[0], cached=cached)
        sharing.forget()
    shutil.copytree(adapters[1], changing, dirs_exist_ok=True)
    time.sleep(CHECK_S)
    sharing.generate(asked, adapter=changing)[0].check_same(rights[0], cached=0)
    sharing.forget()
    assert sharing.tell("load_in_place", adapter=str(changing))
    for cached in (0, BLOCKS * BLOCK_TOKENS):
        sharing.save(asked, adapter=changing)[0].check_same(rights[1], cached=cached)
        sharing.forget()
    with Engine(model, store=PATIENT | {"master": store.address}, **OPTIONS) as fresh:
        fresh.generate(asked, adapter=changing)[0].check_same(rights[1], cached=BLOCKS * BLOCK_TOKENS)


SEEN = BLOCKS * BLOCK_TOKENS + IMAGE_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
"""The image comes before the prompt."""
IMAGES = (1, 2)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory, "images")


@pytest.fixture(scope="module")
def looking(seeing: Path) -> Iterator[Engine]:
    with Engine(seeing) as engine:
        yield engine


def test_blocks_of_an_image_are_shared_for_that_image_only(seeing: Path, store: Cluster, looking: Engine) -> None:
    asked = prompt(500, BLOCKS)
    right = {image: looking.generate(asked, images=[image])[0] for image in IMAGES}
    one, other = right.values()
    assert one.logprobs != pytest.approx(other.logprobs, abs=0.01), "each makes something else of the prompt"
    settings = PATIENT | {"master": store.address}
    with Engine(seeing, store=settings) as first:
        first.save(asked, images=IMAGES[:1])[0].check_same(right[IMAGES[0]])
    with Engine(seeing, store=settings) as second:
        for image, cached in zip(IMAGES, (SEEN, 0), strict=True):
            second.generate(asked, images=[image])[0].check_same(right[image], cached=cached)
