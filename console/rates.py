"""Rates of what nodes count, from one look to the next. Sans-I/O: the time is passed in.

A node tells its counters with each heartbeat, so a rate is taken from heartbeat to heartbeat and not from look to look: else it would be
nothing at one look and twice as much at the next.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(slots=True)
class _Told:
    """A node's last heartbeat: when, under which registration, with which counters, and the rates up to it."""

    at_s: float
    epoch: Hashable
    counters: Mapping[str, float]
    rates: dict[str, float] = field(default_factory=dict)


SAME_HEARTBEAT_S: Final = 0.01
"""Heartbeats closer than this are one: their age is told, from which the time of one varies by what the telling took."""
SLOWLY_TOLD_S: Final = 0.5
"""So are those closer than this, half a heartbeat's usual interval, with the same counters: the telling may have taken long."""


class Rates:
    """The rates of any number of sources by name. Not thread-safe."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def of(self, name: str, *, at_s: float, epoch: Hashable, counters: Mapping[str, float]) -> Mapping[str, float]:
        """What the counters grew by in a second, up to `at_s`; nothing for one that has been heard from once, or has registered anew.

        A counter that fell began again at 0.
        """
        last = self._told.get(name)
        if last is None or last.epoch != epoch:
            self._told[name] = _Told(at_s, epoch, counters)
            return self._told[name].rates
        elapsed_s = at_s - last.at_s
        if elapsed_s < SAME_HEARTBEAT_S or (elapsed_s < SLOWLY_TOLD_S and counters == last.counters):
            return last.rates
        rates = {key: _grown(value, last.counters.get(key, 0)) / elapsed_s for key, value in counters.items()}
        self._told[name] = _Told(at_s, epoch, counters, rates)
        return rates

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        for name in self._told.keys() - set(names):
            del self._told[name]


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now
