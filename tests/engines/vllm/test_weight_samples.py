"""Samples of weights in memory: equal for equal weights, other ones after a small step of training."""

from types import SimpleNamespace
from typing import Any

import torch

from kvstore.engines.vllm.weight_samples import sample_weights


def model(seed: int = 0, layers: int = 40) -> torch.nn.Module:
    numbers = torch.Generator().manual_seed(seed)
    made = torch.nn.Module()
    for layer in range(layers):
        made.register_parameter(f"layer{layer}", torch.nn.Parameter(torch.randn(64, 96, generator=numbers) * 0.02))
    made.register_parameter("empty", torch.nn.Parameter(torch.empty(0)))
    return made


def sample(of: torch.nn.Module, draft: Any = None) -> str:
    drafter = SimpleNamespace(model=draft)
    return sample_weights(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: of, drafter=drafter)))


def test_sample_is_that_of_the_weights() -> None:
    assert sample(model()) == sample(model()) != sample(model(1))
    assert sample_weights(SimpleNamespace(model_runner=SimpleNamespace(get_model=model))) == sample(model())


def test_sample_has_the_draft_model() -> None:
    assert len({sample(model()), sample(model(), model(1)), sample(model(), model(2))}) == 3
    assert sample(model(), "a drafter without weights") == sample(model())


def test_sample_sees_a_small_step_of_training() -> None:
    """In bfloat16, of weights that a trainer has in float32."""
    trained, after = model(layers=600), model(layers=600)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.add_(1e-6 * torch.sign(parameter))
    assert sample(trained.bfloat16()) != sample(after.bfloat16())


def test_sample_of_many_parameters_is_of_some_of_each_part() -> None:
    many = model(layers=1500)
    before = sample(many)
    with torch.no_grad():
        many.get_parameter("layer1498").add_(1.0)
    assert sample(many) != before
