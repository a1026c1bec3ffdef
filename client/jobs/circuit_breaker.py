"""Circuit breaker: after consecutive failures, calls are skipped until a probe finds the peer again. Sans-I/O.

    CLOSED    --`failures` in a row-->  OPEN       calls go to the peer
    OPEN      --probe_interval_s-->     HALF_OPEN  calls are skipped, at no cost
    HALF_OPEN --end of the probe-->     CLOSED or OPEN; calls are skipped, one probe runs

Each change of state begins an epoch. The outcome of a call from an earlier epoch is ignored: a call that began before
the peer was found and times out afterwards is no evidence about the peer now.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class CircuitState(Enum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerStats:
    """Counters since the breaker was created."""

    state: CircuitState = CircuitState.CLOSED
    opened: int = 0
    """Transitions from CLOSED to OPEN."""
    skipped: int = 0
    """Calls that were not sent because the breaker was not closed."""
    failures: int = 0
    """Failed calls and probes of the current epoch when they ended."""
    probes: int = 0
    open_s: float = 0.0
    """Total time that it was not closed."""


class CircuitBreaker:
    """Circuit breaker of one peer. Not thread-safe."""

    def __init__(self, *, failures: int, probe_interval_s: float, clock_ns: Callable[[], int]) -> None:
        """Start closed. `clock_ns` is monotonic."""
        self._limit = failures
        self._interval_ns = int(probe_interval_s * 1e9)
        self._clock_ns = clock_ns
        self._in_a_row = 0
        self._opened_ns = 0
        self._open_ns = 0
        self._opened = self._skipped = self._failures = self._probes = 0
        self.state = CircuitState.CLOSED
        self.epoch = 0
        """Epoch of a call that begins now."""
        self.probe_at_ns = 0
        """Earliest time of the next probe, while open."""

    def admits(self) -> bool:
        """Return whether a call may be sent. A refused call is counted as skipped."""
        if self.state is CircuitState.CLOSED:
            return True
        self._skipped += 1
        return False

    def begin_probe(self) -> bool:
        """Return whether a probe is due. After True the caller runs it and reports its end; one probe runs at a time."""
        if self.state is not CircuitState.OPEN or self._clock_ns() < self.probe_at_ns:
            return False
        self._enter(CircuitState.HALF_OPEN)
        self._probes += 1
        return True

    def succeeded(self, epoch: int) -> None:
        """Report that a call or probe begun in `epoch` was answered, positively or not."""
        if epoch != self.epoch:
            return
        self._in_a_row = 0
        if self.state is CircuitState.HALF_OPEN:
            self._open_ns += self._clock_ns() - self._opened_ns
            self._enter(CircuitState.CLOSED)

    def failed(self, epoch: int) -> None:
        """Report that a call or probe begun in `epoch` did not reach the peer, or timed out."""
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
        """Report that the probe begun in `epoch` sent nothing: another may begin at once. No effect for a call."""
        if epoch == self.epoch and self.state is CircuitState.HALF_OPEN:
            self.probe_at_ns = self._clock_ns()
            self._enter(CircuitState.OPEN)

    def stats(self) -> BreakerStats:
        open_ns = self._open_ns + (self._clock_ns() - self._opened_ns if self.state is not CircuitState.CLOSED else 0)
        return BreakerStats(self.state, self._opened, self._skipped, self._failures, self._probes, open_ns / 1e9)

    def _enter(self, state: CircuitState) -> None:
        self.state = state
        self.epoch += 1
