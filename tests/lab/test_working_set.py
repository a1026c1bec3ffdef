"""Promises of working_set.py, against looking at every use."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.lab.accesses import flatten
from kvstore.lab.working_set import working_set
from kvstore.protocol.errors import InvalidArgument
from tests.lab.prompts import prompts, requests


@given(prompts, st.sampled_from([0.5, 1.0, 3.0, 7.5, float("inf")]))
def test_it_is_the_different_blocks_of_a_window_that_ends_now(found: list[list[int]], window_s: float) -> None:
    at_s = np.arange(-1, len(found) + 3, 0.5)
    sizes = working_set(flatten(requests(found)), window_s=window_s, at_s=at_s)
    for now_s, size in zip(at_s, sizes, strict=True):
        within = [prompt for time_s, prompt in enumerate(found) if now_s - window_s < time_s <= now_s]
        assert size == len({block for prompt in within for block in prompt})


@pytest.mark.parametrize("window_s", [0.0, -1.0, float("nan")])
def test_a_window_has_a_length(window_s: float) -> None:
    with pytest.raises(InvalidArgument, match="above 0"):
        working_set(flatten([]), window_s=window_s, at_s=np.zeros(1))
