"""A breaker: after failures in a row it answers for a peer that cannot be reached, until one probe has found it again. Sans-I/O.

    CLOSED   --`failures` in a row-->  OPEN     calls go to the peer
    OPEN     --probe_interval_s-->     PROBING  calls are skipped, and cost nothing
    PROBING  --the probe's end-->      CLOSED, or OPEN again; calls are skipped, one asks

Each change of state begins a new epoch. How a call of an earlier epoch ended is ignored: one that was begun before the peer was found again
and times out afterwards says nothing about the peer now.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class CircuitState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True, slots=True)
class BreakerStats:
    """Counters since the breaker was made."""

    state: CircuitState = CircuitState.CLOSED
    opened: int = 0
    """Times that it opened, a probe that failed not counted."""
    skipped: int = 0
    """Calls that were answered without asking."""
    failures: int = 0
    """Calls of the time that ended in a failure."""
    probes: int = 0
    away_s: float = 0.0
    """Time that it was not closed, so far."""


class CircuitBreaker:
    """See the module. Not thread-safe."""

    def __init__(self, *, failures: int, probe_interval_s: float, clock_ns: Callable[[], int]) -> None:
        """Closed. `clock_ns` is monotonic."""
        self._limit = failures
        self._interval_ns = int(probe_interval_s * 1e9)
        self._clock_ns = clock_ns
        self._in_a_row = 0
        self._opened_ns = 0
        self._away_ns = 0
        self._opened = self._skipped = self._failures = self._probes = 0
        self.state = CircuitState.CLOSED
        self.epoch = 0
        """Of a call that begins now."""
        self.probe_at_ns = 0
        """When a probe may begin, while it is open."""

    def admits(self) -> bool:
        """May a call ask the peer? One that may not is counted as skipped."""
        if self.state is CircuitState.CLOSED:
            return True
        self._skipped += 1
        return False

    def begin_probe(self) -> bool:
        """Is a probe due? Whoever is told True makes it, and says how it ended: there is one at a time."""
        if self.state is not CircuitState.OPEN or self._clock_ns() < self.probe_at_ns:
            return False
        self._enter(CircuitState.PROBING)
        self._probes += 1
        return True

    def succeeded(self, epoch: int) -> None:
        """A call or probe begun in `epoch` had an answer, whatever it says."""
        if epoch != self.epoch:
            return
        self._in_a_row = 0
        if self.state is CircuitState.PROBING:
            self._away_ns += self._clock_ns() - self._opened_ns
            self._enter(CircuitState.CLOSED)

    def failed(self, epoch: int) -> None:
        """The peer could not be reached by a call or probe begun in `epoch`, or did not answer in time."""
        if epoch != self.epoch:
            return
        self._failures += 1
        self._in_a_row += 1
        if self.state is CircuitState.CLOSED:
            if self._in_a_row < self._limit:
                return
            self._opened += 1
            self._opened_ns = self._clock_ns()
        self._in_a_row = 0
        self.probe_at_ns = self._clock_ns() + self._interval_ns
        self._enter(CircuitState.OPEN)

    def abandoned(self, epoch: int) -> None:
        """The probe begun in `epoch` has asked nothing after all: another may begin at once. Of a call: nothing."""
        if epoch == self.epoch and self.state is CircuitState.PROBING:
            self.probe_at_ns = self._clock_ns()
            self._enter(CircuitState.OPEN)

    def stats(self) -> BreakerStats:
        away_ns = self._away_ns + (self._clock_ns() - self._opened_ns if self.state is not CircuitState.CLOSED else 0)
        return BreakerStats(self.state, self._opened, self._skipped, self._failures, self._probes, away_ns / 1e9)

    def _enter(self, state: CircuitState) -> None:
        self.state = state
        self.epoch += 1
