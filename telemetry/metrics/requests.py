"""What a server's peers ask of it: how long each kind of request took, and why some were refused. Of the loop that serves them."""

import re
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.messages import MESSAGES, NO_REQUESTS
from kvstore.rpc.tracing import Peer
from kvstore.telemetry.metrics.histogram import Counts, Histogram
from kvstore.telemetry.metrics.slow_requests import Slow, SlowRequests

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

    def __init__(self, *, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self.slowest: Final = SlowRequests()
        self.slow_ns = self.slowest.floor_ns
        self._histograms: dict[int, Histogram] = {}
        self.answered: Final = _Recorders(self._histograms)
        self._refused: dict[str, int] = {}
        self._turns: deque[dict[int, int]] = deque(maxlen=KEPT_TURNS - 1)
        """What was slowest in each turn that is over, in ns."""

    def slow(self, peer: Peer, kind: int, elapsed_ns: int) -> None:
        """Keep it, of the tenant that the peer's context names."""
        if kind in OPERATIONS:
            tenant = getattr(peer.context, "tenant", "")
            self.slowest.add(Slow(tenant, OPERATIONS[kind], elapsed_ns, self._wall_s(), peer.peer()))
            self.slow_ns = self.slowest.floor_ns

    def turn(self) -> None:
        """What was slowest KEPT_TURNS ago is forgotten. In between the loop's logs grow: by 36 bytes a request."""
        self.slowest.run_due(time.monotonic_ns())
        self.slow_ns = self.slowest.floor_ns
        self._turns.append({kind: histogram.slowest_ns() for kind, histogram in self._histograms.items()})
        for histogram in self._histograms.values():
            histogram.forget_slowest()

    def told(self) -> dict[str, int]:
        """For the status: of each operation `request_NAME_count`, `request_NAME_us` (of all together) and `request_NAME_slowest_us`."""
        found: dict[str, int] = {}
        for kind, histogram in self._histograms.items():
            name, counts = f"request_{OPERATIONS[kind]}", histogram.counts()
            found[f"{name}_count"] = sum(counts.counts)
            found[f"{name}_us"] = round(counts.sum_s * 1e6)
            found[f"{name}_slowest_us"] = max(histogram.slowest_ns(), *(turn.get(kind, 0) for turn in self._turns), 0) // 1000
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


class _Recorders(dict[int, Callable[[int], None]]):
    """By the type of a request's message: what takes how long it took. All that it does is to append to a log."""

    def __init__(self, histograms: dict[int, Histogram]) -> None:
        super().__init__()
        self._histograms = histograms

    def __missing__(self, kind: int) -> Callable[[int], None]:
        if kind not in OPERATIONS:
            return _nobody_asks
        histogram = self._histograms[kind] = Histogram()
        recorder = self[kind] = histogram.log.append
        return recorder


def _nobody_asks(_elapsed_ns: int) -> None:
    """It is no request."""
