"""Impossible SLOs are refused; a prompt's last token is always computed."""

import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.request import ScheduleRequest, Slo


@pytest.mark.parametrize(("ttft_s", "tbt_s", "name"), [(0, 1, "ttft_s"), (-1, 1, "ttft_s"), (1, 0, "tbt_s"), (1, float("nan"), "tbt_s")])
def test_an_impossible_slo_is_refused_by_name(ttft_s: float, tbt_s: float, name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        Slo(ttft_s, tbt_s)


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 0), (1, 16), (2, 31), (9, 31)])
def test_the_last_token_needs_a_prefill(blocks: int, tokens: int) -> None:
    assert ScheduleRequest((), input_tokens=32, block_tokens=16).prefix_tokens(blocks) == tokens
