"""Promises of decode.py. A step takes a microsecond of the clock."""

import asyncio

from kvstore.router.standin.compute import DecodeEngine, Joined
from tests.router.scripted import following, run


class Times:
    """A step takes as many seconds as it has sequences."""

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return float(batch)


def engine(capacity_tokens: int = 0) -> tuple[DecodeEngine, list[tuple[int, int, float]]]:
    """And the steps it makes: batch, context and seconds."""
    steps: list[tuple[int, int, float]] = []
    return DecodeEngine(Times(), speedup=1e6, capacity_tokens=capacity_tokens, on_step=lambda *step: steps.append(step)), steps


async def made(of: DecodeEngine, sequence: Joined, count: int) -> list[int]:
    try:
        return [await sequence.made.get() for _ in range(count)]
    finally:
        of.leave(sequence)


def test_what_does_not_fit_waits_in_line() -> None:
    async def test() -> None:
        decode, steps = engine(capacity_tokens=30)
        sequences = [decode.join([1] * 20, 2), decode.join([2] * 25, 2), decode.join([3], 2)]
        assert decode.batch == 3
        await asyncio.gather(*(made(decode, sequence, 2) for sequence in sequences))
        assert [batch for batch, _, _ in steps] == [1, 1, 2, 2], "the short one has not overtaken the long one"

    run(test())


def test_one_that_leaves_makes_room() -> None:
    async def test() -> None:
        decode, _ = engine(capacity_tokens=30)
        running, waiting, last = decode.join([1] * 20, 9), decode.join([2] * 20, 9), decode.join([3] * 20, 3)
        await running.made.get()
        decode.leave(waiting)
        decode.leave(running)
        decode.leave(running)
        assert await made(decode, last, 3) == following([3] * 20, 3)
        assert decode.batch == 0

    run(test())
