"""disaggregation/small_model.py: one recipe, one model; made once."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from disaggregation.llama import Tensor, whole  # noqa: E402
from disaggregation.small_model import trained  # noqa: E402
from transformers.utils import logging  # noqa: E402

pytestmark = pytest.mark.slow

logging.disable_progress_bar()


def weights(place: Path) -> Tensor:
    return torch.cat([values.flatten() for values in whole(place).state_dict().values()])


def test_a_recipe_always_makes_the_same_model_and_only_once(tmp_path: Path) -> None:
    first = trained(tmp_path / "a", seed=1, steps=2)
    made_ns = (first / "model.safetensors").stat().st_mtime_ns
    assert trained(tmp_path / "a", seed=1, steps=2) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made_ns
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == [first.name], "nothing half made is left"
    assert torch.equal(weights(trained(tmp_path / "b", seed=1, steps=2)), weights(first))
    assert not torch.equal(weights(trained(tmp_path / "a", seed=2, steps=2)), weights(first))
