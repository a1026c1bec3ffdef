"""Promises of strategies.py."""

import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.pressure.strategies import STRATEGIES, Displaced, LowerTier, Newcomers, Server
from tests.scheduler.pressure.pressed import RoundTimes


def test_the_five_and_their_best_known_combination_differ_in_what_they_do() -> None:
    assert [strategy.name for strategy in STRATEGIES] == ["reject", "queue", "evict", "recompute", "offload", "queue+recompute"]
    assert len({(strategy.newcomers, strategy.displaced) for strategy in STRATEGIES}) == 6
    for strategy in STRATEGIES:
        # Who displaces must displace somebody, and who rejects sets room aside.
        assert strategy.newcomers is not Newcomers.DISPLACE or strategy.displaced is not Displaced.NOBODY
        assert strategy.newcomers is not Newcomers.REJECTED or strategy.displaced is Displaced.NOBODY


@pytest.mark.parametrize(("capacity_bytes", "bytes_per_s"), [(-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_tier_that_cannot_be_is_refused(capacity_bytes: int, bytes_per_s: float) -> None:
    with pytest.raises(InvalidArgument, match="the tier NVMe must have a capacity of 0 or more and a bandwidth above 0"):
        LowerTier(name="NVMe", capacity_bytes=capacity_bytes, bytes_per_s=bytes_per_s)


@pytest.mark.parametrize(("cache_tokens", "kv_bytes_per_token"), [(0, 1.0), (1, 0.0)])
def test_a_server_without_a_cache_is_refused(cache_tokens: int, kv_bytes_per_token: float) -> None:
    with pytest.raises(InvalidArgument, match="room for a token of KV cache"):
        Server(times=RoundTimes(), cache_tokens=cache_tokens, kv_bytes_per_token=kv_bytes_per_token)
