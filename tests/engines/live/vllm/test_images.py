"""Images: tokens that stand for one are the same for all, their blocks are for prompts with that very image only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.processes import Cluster
from tests.engines.live.pictures import IMAGE_TOKENS
from tests.engines.live.vllm.conftest import make_model
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, prompt

BLOCKS = 5
CACHED = BLOCKS * BLOCK_TOKENS + IMAGE_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
"""The image comes before the prompt."""
IMAGES = (1, 2)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory, "images")


@pytest.fixture(scope="module")
def computing(seeing: Path) -> Iterator[Engine]:
    with Engine(seeing) as engine:
        yield engine


def test_blocks_that_an_image_made_another_process_takes_for_that_image_only(seeing: Path, store: Cluster, computing: Engine) -> None:
    asked = prompt(500, BLOCKS)
    right = {image: computing.generate(asked, images=[image])[0] for image in IMAGES}
    one, other = right.values()
    assert one.logprobs != pytest.approx(other.logprobs, abs=0.01), "each makes something else of the prompt"
    settings = PATIENT | {"master": store.address}
    with Engine(seeing, store=settings) as first:
        (cold,) = first.generate(asked, images=IMAGES[:1])
        cold.check_same(right[IMAGES[0]])
        first.flush()
    with Engine(seeing, store=settings) as second:
        for image, cached in zip(IMAGES, (CACHED, 0), strict=True):
            (answer,) = second.generate(asked, images=[image])
            answer.check_same(right[image])
            assert answer.cached == cached
