"""Promises of plan.py."""

import math
from typing import Any

import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.simulator.plan import Mode, Plan


def test_every_instance_does_both_where_they_are_coupled() -> None:
    assert Plan(prefill=3, decode=2).instances == 5
    assert [mode for mode in Mode if not mode.is_coupled] == [Mode.DISAGGREGATED]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prefill", 0, "prefill is 0: it must be from 1 to 4,096"),
        ("decode", 5000, "decode is 5000: it must be from 1 to 4,096"),
        ("chunk_tokens", 0, "chunk_tokens is 0: it must be from 1 to 1,048,576"),
        ("cache_blocks", -1, "cache_blocks is -1: it must be 0 or more"),
        ("rate", 0.0, "rate is 0: it must be from 1e-09 to 1e[+]09"),
        ("rate", 1e-305, "rate is 1e-305: it must be from"),
        ("rate", math.nan, "rate is nan: it must be from"),
        ("rate", math.inf, "rate is inf: it must be from"),
        ("sample_s", -1.0, "sample_s is -1: it must be from"),
        ("decision_s", -1.0, "decision_s is -1: it must be from 0 to 1e[+]09 seconds"),
        ("decision_s", math.nan, "decision_s is nan: it must be from 0 to 1e[+]09 seconds"),
    ],
)
def test_what_cannot_be_simulated_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Plan(**{name: value})
