"""What a server's peers ask of it: how long each kind of request took, and why some were refused. Of the loop that serves them."""

import re
from collections import deque
from typing import Final

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.messages import MESSAGES, NO_REQUESTS
from kvstore.telemetry.metrics.histogram import Counts, Histogram

_CAPITAL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


def in_words(name: str) -> str:
    """`MatchPrefix` as `match_prefix`: a label's value."""
    return _CAPITAL.sub("_", name).lower()


OPERATIONS: Final = {number: in_words(message.__name__) for number, message in MESSAGES.items() if number not in NO_REQUESTS}
"""The requests of all daemons, by the type of their messages."""


TURN_S: Final = 1.0
"""How often whoever owns a `Requests` turns it."""
KEPT_TURNS: Final = 60
"""The slowest request of each kind is that of as many turns: of the last minute."""


class Requests:
    """An `rpc.observing.Observer`. The loop is the only writer."""

    def __init__(self) -> None:
        self._histograms: dict[int, Histogram] = {}
        self._refused: dict[str, int] = {}
        self._slowest_ns: dict[int, int] = {}
        self._turns: deque[dict[int, int]] = deque([self._slowest_ns], maxlen=KEPT_TURNS)

    def answered(self, kind: int, elapsed_ns: int) -> None:
        """A request of that kind has its answer, after so long."""
        histogram = self._histograms.get(kind)
        if histogram is None:
            if kind not in OPERATIONS:
                return
            histogram = self._histograms[kind] = Histogram()
        histogram.observe(elapsed_ns)
        if elapsed_ns > self._slowest_ns.get(kind, 0):
            self._slowest_ns[kind] = elapsed_ns

    def turn(self) -> None:
        """What was slowest KEPT_TURNS ago is forgotten."""
        self._slowest_ns = {}
        self._turns.append(self._slowest_ns)

    def told(self) -> dict[str, int]:
        """For the status: of each operation `request_NAME_count`, `request_NAME_us` (of all together) and `request_NAME_slowest_us`."""
        found: dict[str, int] = {}
        for kind, histogram in self._histograms.items():
            name, counts = f"request_{OPERATIONS[kind]}", histogram.counts()
            found[f"{name}_count"] = sum(counts.counts)
            found[f"{name}_us"] = round(counts.sum_s * 1e6)
            found[f"{name}_slowest_us"] = max(turn.get(kind, 0) for turn in self._turns) // 1000
        return found

    def refused(self, error: KVStoreError) -> None:
        """That was the answer."""
        name = in_words(type(error).__name__)
        self._refused[name] = self._refused.get(name, 0) + 1

    def durations(self) -> dict[tuple[str, ...], Counts]:
        """By operation."""
        return {(OPERATIONS[kind],): histogram.counts() for kind, histogram in list(self._histograms.items())}

    def refusals(self) -> dict[tuple[str, ...], float]:
        """By reason: the error's name."""
        return {(name,): count for name, count in list(self._refused.items())}
