"""A server with times that can be reckoned by hand, and users who follow a script."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.lab.pressure.load import Generation
from kvstore.lab.pressure.server import PressedServer
from kvstore.lab.pressure.strategies import STRATEGIES, LowerTier, ServingModel, Strategy

BYTES_PER_TOKEN = 10


class RoundTimes:
    """Step times: 1 s for a prompt token, 1/8 s for a decode step of any batch."""

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return float(input_tokens - prefix_tokens)

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        assert batch > 0
        assert context_tokens >= batch
        return 0.125


class Asked(NamedTuple):
    at_s: float
    prompt: int
    output: int


class Script:
    """Askers: a user each request, who never asks again."""

    def __init__(self, *requests: Asked) -> None:
        self._requests = requests
        self.sent = 0

    @property
    def next_s(self) -> float | None:
        return self._requests[self.sent].at_s if self.sent < len(self._requests) else None

    def take(self) -> Generation:
        at_s, prompt, output = self._requests[self.sent]
        self.sent += 1
        return Generation(self.sent - 1, self.sent - 1, at_s, prompt, output)

    def finish(self, user: int, *, now_s: float) -> None:
        assert now_s >= self._requests[user].at_s


def strategy(name: str) -> Strategy:
    return next(each for each in STRATEGIES if each.name == name)


def server(cache_tokens: int, *lower: LowerTier) -> ServingModel:
    return ServingModel(times=RoundTimes(), cache_tokens=cache_tokens, kv_bytes_per_token=BYTES_PER_TOKEN, lower_tiers=lower)


def dram(capacity_tokens: int, *, bytes_per_s: float = 80.0) -> LowerTier:
    return LowerTier(name="DRAM", capacity_bytes=capacity_tokens * BYTES_PER_TOKEN, bytes_per_s=bytes_per_s)


def serve(serving: ServingModel, name: str, requests: Sequence[Asked]) -> PressedServer:
    """To the end, its integrity checked at each step."""
    pressed = PressedServer(serving, strategy(name), Script(*requests))
    while pressed.step():
        pressed.check_integrity()
    pressed.check_integrity()
    return pressed
