"""What a server's peers ask of it: how long each kind of request took, and why some were refused. Of the loop that serves them."""

import re
from typing import Final

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.messages import MESSAGES, REPLIES
from kvstore.telemetry.metrics.histogram import Counts, Histogram

_CAPITAL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


def in_words(name: str) -> str:
    """`MatchPrefix` as `match_prefix`: a label's value."""
    return _CAPITAL.sub("_", name).lower()


OPERATIONS: Final = {number: in_words(message.__name__) for number, message in MESSAGES.items() if number not in REPLIES}
"""The requests of all daemons, by the type of their messages."""


class Requests:
    """An `rpc.observing.Observer`. The loop is the only writer."""

    def __init__(self) -> None:
        self._histograms: dict[int, Histogram] = {}
        self._refused: dict[str, int] = {}

    def answered(self, kind: int, elapsed_ns: int) -> None:
        """A request of that kind has its answer, after so long."""
        histogram = self._histograms.get(kind)
        if histogram is None:
            if kind not in OPERATIONS:
                return
            histogram = self._histograms[kind] = Histogram()
        histogram.observe(elapsed_ns)

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
