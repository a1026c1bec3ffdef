"""Promises of plan.py."""

import math
from typing import Any

import pytest

from kvstore.lab.simulator.plan import Mode, SimulationPlan
from kvstore.protocol.errors import ConfigError, InvalidArgument
from tests.lab.simulator.parts import machine


def test_without_a_prefix_a_prefill_is_what_the_model_says() -> None:
    assert machine().prefill_s(2048, 0) == 2.0
    assert machine().tbt_s(4, 100) == 1 / 8


def pipeline_s(layers: int, load_s: float, compute_s: float) -> float:
    """A layer at a time: layer i is computed once it is loaded and layer i - 1 is computed."""
    loaded_s = computed_s = 0.0
    for _ in range(layers):
        loaded_s += load_s
        computed_s = max(computed_s, loaded_s) + compute_s
    return computed_s


@pytest.mark.parametrize("new_tokens", [4, 40, 64, 400, 4000])
def test_loading_a_prefix_hides_behind_the_layers_before(new_tokens: int) -> None:
    """1024 tokens take 1/16 s to load, a layer of them 1/64 s; 64 new tokens take as long to compute."""
    found_s = machine().prefill_s(1024 + new_tokens, 1024)
    assert found_s == pytest.approx(pipeline_s(4, 1 / 64, new_tokens / 1024 / 4))


def test_a_model_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no GPU memory"):
        machine(capacity_tokens=0)


@pytest.mark.parametrize("name", ["send_bytes_per_s", "load_bytes_per_s"])
@pytest.mark.parametrize("value", [0.0, math.inf])
def test_a_bandwidth_of_nothing_or_without_end_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is {value:g}: it must be from 1 to 1e[+]18"):
        machine(**{name: value})


def test_every_instance_does_both_where_they_are_coupled() -> None:
    assert SimulationPlan(prefill=3, decode=2).instances == 5
    assert [mode for mode in Mode if not mode.is_coupled] == [Mode.DISAGGREGATED]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prefill", 0, "prefill is 0: it must be from 1 to 4,096"),
        ("decode", 5000, "decode is 5000: it must be from 1 to 4,096"),
        ("chunk_tokens", 0, "chunk_tokens is 0: it must be from 1 to 1,048,576"),
        ("cache_blocks", -1, "cache_blocks is -1: it must be 0 or more"),
        ("rate", 0.0, "rate is 0: it must be from 1e-09 to 1e[+]09"),
        ("rate", math.nan, "rate is nan: it must be from"),
    ],
)
def test_what_cannot_be_simulated_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SimulationPlan(**{name: value})
