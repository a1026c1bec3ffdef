"""Promises of `Timings` in stats.py."""

import asyncio
from typing import Any

import pytest

from kvstore.client.stats import PERIOD, Timings, timed, timed_async


class Calls:
    """A client of quick calls and of others."""

    def __init__(self) -> None:
        self._timings = Timings()
        self.made = 0

    def quick(self) -> int:
        timings = self._timings
        timings.untimed -= 1
        if timings.untimed < 0:
            return timings.sample("quick", self.quick)
        self.made += 1
        return self.made

    @timed
    def slow(self, *, fails: bool = False) -> str:
        """Return, or raise."""
        if fails:
            raise ValueError("refused")
        return "done"

    @timed_async
    async def slow_async(self, *, fails: bool = False) -> str:
        return self.slow(fails=fails)

    def counts(self) -> dict[Any, int]:
        return {name: sum(counts.counts) for name, counts in self._timings.durations.read().items()}


def test_quick_calls_are_sampled() -> None:
    calls = Calls()
    assert [calls.quick() for _ in range(3)] == [1, 2, 3]
    assert calls.counts() == {("quick",): 1}
    for _ in range(10 * PERIOD):
        calls.quick()
    assert calls.made == 3 + 10 * PERIOD
    assert calls.counts() == {("quick",): 1 + 10 * PERIOD}


def test_other_calls_are_all_timed() -> None:
    calls = Calls()
    assert calls.slow() == "done"
    with pytest.raises(ValueError, match="refused"):
        calls.slow(fails=True)
    assert (calls.slow.__name__, calls.slow.__doc__) == ("slow", "Return, or raise.")
    assert asyncio.run(calls.slow_async()) == "done"
    assert calls.counts() == {("slow",): 3, ("slow_async",): 1}
