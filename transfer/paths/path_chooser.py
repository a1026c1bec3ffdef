"""Choice of the path for each slice to one peer: by load, measured bandwidth and NUMA distance, with a cooldown after
failures. Sans-I/O.

Source: score, probes and cooldown are those of Mooncake's TENT, https://github.com/kvcache-ai/Mooncake; the bandwidth
estimate is not.
"""

import itertools
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.transfer.config import TransferSettings

AVERAGING_NS: Final = 250_000_000
"""Time constant of the bandwidth estimate: a change of rate is followed within about a second (four times this)."""
SAMPLE_BYTES: Final = 256 << 10
"""Smallest sample between two idle times that measures a rate; smaller ones measure mostly latency."""
UNKNOWN_SPEED_BYTES_S: Final = 12.5e9
"""Assumed for a path of unknown link speed, 100 Gbit/s: high, so that it is tried and measured."""
LATENCY_BUCKETS: Final = 32


class MeasuredRate(NamedTuple):
    """A measured rate, over at least SAMPLE_BYTES."""

    bytes_s: float
    basis_bytes: int
    """Bytes that it is based on; older ones count less."""
    measured_ns: int
    """Arrival of the last of them, on the engine's clock."""


class Bandwidth:
    """Bandwidth estimate: bytes delivered over busy time, both decaying exponentially.

    Not the mean of size over latency of single slices. With several slices in flight each waits for those before it, so
    that mean would be the rate divided by their number, and lower the more a rail is used. The bytes that a rail
    delivers per time while anything is in flight are its rate for any number of slices, as in the delivery rate of BBR.
    Source: Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14 (2016). The ratio of two decayed
    sums weighs every nanosecond alike; a mean of ratios would let a burst from a shaper's bucket count as much as a
    long slice.
    """

    __slots__ = ("_busy_ns", "_bytes", "_sample_bytes", "_sample_ns", "measured_ns")

    def __init__(self, bytes_s: float) -> None:
        """`bytes_s` is assumed until the first measurement."""
        self._bytes, self._busy_ns = bytes_s, 1e9
        self._sample_ns = 0
        self._sample_bytes = 0
        self.measured_ns = -1
        """Time of the last measurement; -1: never."""

    @property
    def bytes_s(self) -> float:
        return self._bytes / self._busy_ns * 1e9

    def measured(self) -> MeasuredRate | None:
        """Return the rate, or None until enough was delivered."""
        if self.measured_ns < 0 or self._bytes < SAMPLE_BYTES:
            return None
        return MeasuredRate(self.bytes_s, int(self._bytes), self.measured_ns)

    def restart(self, now_ns: int) -> None:
        """Start a sample now: the path was idle, or something failed on it."""
        self._sample_ns, self._sample_bytes = now_ns, 0

    def delivered(self, size_bytes: int, now_ns: int, *, is_idle: bool) -> None:
        """Count bytes delivered since the last call; with `is_idle` nothing is in flight any more."""
        self._sample_bytes += size_bytes
        if not is_idle and self._sample_bytes < SAMPLE_BYTES:
            return
        took_ns = max(now_ns - self._sample_ns, 1)
        # A small sample can raise the estimate, not lower it: it measures mostly latency.
        if self._sample_bytes >= SAMPLE_BYTES or self._sample_bytes * self._busy_ns > self._bytes * took_ns:
            # Old measurements decay while the path is idle, too, so that a single probe can outweigh them.
            kept = math.exp((self.measured_ns - now_ns) / AVERAGING_NS) if self.measured_ns >= 0 else 0.0
            self._bytes = self._bytes * kept + self._sample_bytes
            self._busy_ns = self._busy_ns * kept + took_ns
            self.measured_ns = now_ns
        self.restart(now_ns)


class Path(NamedTuple):
    """A path to the peer: a transport, and a rail at either end."""

    transport: str
    local_rail: str
    remote_rail: str


@dataclass(frozen=True, slots=True)
class PathFacts:
    """Static properties of a path."""

    preference: int = 0
    """Rank of its transport: a path is chosen only if no path of a lower rank is usable."""
    speed_bytes_s: float = 0.0
    """Speed of the slower link; 0 if unknown."""


@dataclass(slots=True, eq=False)
class PathState:
    """State and counters of a path. Read-only for others."""

    path: Path
    facts: PathFacts
    bandwidth: Bandwidth
    in_flight_bytes: int = 0
    in_flight_slices: int = 0
    delivered_bytes: int = 0
    delivered_slices: int = 0
    failed_slices: int = 0
    retried_slices: int = 0
    """Slices begun here after a failure elsewhere."""
    latency_counts: list[int] = field(default_factory=lambda: [0] * LATENCY_BUCKETS)
    """[n]: delivered slices that took at least 2^(n-1) and less than 2^n us; the last bucket has all longer ones."""
    consecutive_failures: int = 0
    """Cooldowns since the last delivery; above 0 the path is in cooldown or being probed."""
    failed_ns: int = 0
    cooldown_until_ns: int = 0
    is_present: bool = True
    """False: removed, and forgotten when nothing is in flight on it."""
    last_chosen: int = 0
    """Number of the choice that last selected it."""

    def is_usable(self, now_ns: int) -> bool:
        """Neither in cooldown nor, after one, busy with the one slice that probes it."""
        return not self.consecutive_failures or (now_ns >= self.cooldown_until_ns and not self.in_flight_slices)


class PathChooser:
    """Chooses among the paths to one peer. Not thread-safe: the owner locks. Each slice is `begun` once, then
    `succeeded`, `failed` or `cancelled` once.

    `choose` is O(paths), everything else O(1) except `set_paths` and `next_wakeup_ns`.
    """

    def __init__(self, settings: TransferSettings, random: random.Random) -> None:
        self._settings = settings
        self._random = random
        self._states: dict[Path, PathState] = {}
        self._present: list[PathState] = []
        self._choices = itertools.count(1)
        self.bandwidth = Bandwidth(UNKNOWN_SPEED_BYTES_S)
        """Of all paths together. Not the sum of theirs: two paths may share a rail at the far end, and each was
        measured alone.
        """
        self._in_flight_slices = 0

    @property
    def states(self) -> Mapping[Path, PathState]:
        """All paths, including removed ones with slices in flight."""
        return self._states

    # --- the set of paths ---

    def set_paths(self, paths: Mapping[Path, PathFacts]) -> None:
        """Replace the paths. Paths that stay keep their measurements, even if their facts changed."""
        for path in [path for path in self._states if path not in paths]:
            self.remove(path)
        for path, facts in paths.items():
            self.add(path, facts)

    def add(self, path: Path, facts: PathFacts) -> None:
        """Add a path, or change its facts."""
        state = self._states.get(path)
        if state is None:
            state = self._states[path] = PathState(path, facts, Bandwidth(facts.speed_bytes_s or UNKNOWN_SPEED_BYTES_S))
        state.facts, state.is_present = facts, True
        self._sort()

    def remove(self, path: Path) -> None:
        """Remove a path; slices in flight on it end as they do. Unknown paths are ignored."""
        state = self._states.get(path)
        if state is not None:
            state.is_present = False
            self._forget(state)
            self._sort()

    # --- choice ---

    def choose(
        self, size_bytes: int, now_ns: int, *, excluding: Collection[Path] = (), unpreferred_ends: Mapping[Path, int] | None = None
    ) -> Path | None:
        """Return the path for a slice of this size, or None if none is usable now (see `next_wakeup_ns`).

        Among the usable paths of the most preferred transport: a path whose cooldown is over, to probe it with one
        slice; else the one expected to deliver first, ties round-robin; or, for `probe_share` of the slices, the one
        not measured for longest.
        """
        candidates = self._candidates(now_ns, excluding)
        if not candidates:
            return None
        unpreferred_ends = unpreferred_ends or {}
        chosen = min(candidates, key=lambda state: self._rank(state, size_bytes, unpreferred_ends.get(state.path, 0)))
        if len(candidates) > 1 and not chosen.consecutive_failures and self._random.random() < self._settings.probe_share:
            # Busy paths are being measured already; on a stalled one, probes would pile up until the stall is detected.
            others = [state for state in candidates if state is not chosen and not state.in_flight_slices]
            chosen = min(others, key=lambda state: (state.bandwidth.measured_ns, state.last_chosen), default=chosen)
        chosen.last_chosen = next(self._choices)
        return chosen.path

    def _candidates(self, now_ns: int, excluding: Collection[Path]) -> list[PathState]:
        found: list[PathState] = []
        for state in self._present:
            if found and state.facts.preference != found[0].facts.preference:
                break
            if state.is_usable(now_ns) and state.path not in excluding:
                found.append(state)
        return found

    def _rank(self, state: PathState, size_bytes: int, unpreferred_ends: int) -> tuple[bool, float, int]:
        penalty = self._settings.numa_penalty**unpreferred_ends
        seconds = (state.in_flight_bytes + size_bytes) / state.bandwidth.bytes_s * penalty
        return (not state.consecutive_failures, seconds, state.last_chosen)

    def next_wakeup_ns(self) -> int | None:
        """Return the end of the first cooldown, possibly in the past; None if no path is in cooldown."""
        cooling_down = (state for state in self._present if state.consecutive_failures and not state.in_flight_slices)
        return min((state.cooldown_until_ns for state in cooling_down), default=None)

    # --- results ---

    def begun(self, path: Path, size_bytes: int, now_ns: int, *, is_retry: bool = False) -> None:
        """Record that a slice is in flight on a path returned by `choose`."""
        state = self._states[path]
        if not state.in_flight_slices:
            state.bandwidth.restart(now_ns)
        if not self._in_flight_slices:
            self.bandwidth.restart(now_ns)
        self._in_flight_slices += 1
        state.in_flight_bytes += size_bytes
        state.in_flight_slices += 1
        state.retried_slices += is_retry

    def succeeded(self, path: Path, size_bytes: int, begun_ns: int, now_ns: int) -> None:
        """Record the arrival of a slice that was begun at `begun_ns`."""
        state = self._ended(path, size_bytes)
        state.bandwidth.delivered(size_bytes, now_ns, is_idle=not state.in_flight_slices)
        self.bandwidth.delivered(size_bytes, now_ns, is_idle=not self._in_flight_slices)
        state.delivered_bytes += size_bytes
        state.delivered_slices += 1
        state.latency_counts[min((max(now_ns - begun_ns, 0) // 1000).bit_length(), LATENCY_BUCKETS - 1)] += 1
        if begun_ns >= state.failed_ns:  # a slice begun before the failure is no evidence of recovery
            state.consecutive_failures = 0
        self._forget(state)

    def failed(self, path: Path, size_bytes: int, now_ns: int) -> bool:
        """Record a failure: the path enters a cooldown, each twice as long as the last. Returns False if it already was
        in one, which is not prolonged.
        """
        state = self._ended(path, size_bytes)
        state.bandwidth.restart(now_ns)
        self.bandwidth.restart(now_ns)
        state.failed_slices += 1
        enters_cooldown = not state.consecutive_failures or now_ns >= state.cooldown_until_ns
        if enters_cooldown:
            factor = 2.0 ** min(state.consecutive_failures, 63)
            cooldown_s = min(self._settings.cooldown_s * factor, max(self._settings.cooldown_s, self._settings.cooldown_max_s))
            state.consecutive_failures += 1
            state.failed_ns = now_ns
            state.cooldown_until_ns = now_ns + int(cooldown_s * 1e9)
        self._forget(state)
        return enters_cooldown

    def cancelled(self, path: Path, size_bytes: int) -> None:
        """Record a slice that was abandoned for a reason unrelated to the path."""
        self._forget(self._ended(path, size_bytes))

    def _ended(self, path: Path, size_bytes: int) -> PathState:
        state = self._states[path]
        state.in_flight_bytes -= size_bytes
        state.in_flight_slices -= 1
        self._in_flight_slices -= 1
        return state

    def _forget(self, state: PathState) -> None:
        if not state.is_present and not state.in_flight_slices:
            del self._states[state.path]

    def _sort(self) -> None:
        present = (state for state in self._states.values() if state.is_present)
        self._present = sorted(present, key=lambda state: state.facts.preference)

    def check_integrity(self) -> None:
        """Assert that in-flight counts add up and that only paths in use are kept. For tests; O(paths)."""
        for path, state in self._states.items():
            assert state.path == path
            assert state.in_flight_slices >= 0, path
            assert state.in_flight_bytes >= 0, path
            assert state.in_flight_slices or not state.in_flight_bytes, path
            assert state.is_present or state.in_flight_slices, path
            assert sum(state.latency_counts) == state.delivered_slices, path
            assert state.bandwidth.bytes_s > 0, path
        assert self._in_flight_slices == sum(state.in_flight_slices for state in self._states.values())
        assert {state.path for state in self._present} == {path for path, state in self._states.items() if state.is_present}
        preferences = [state.facts.preference for state in self._present]
        assert preferences == sorted(preferences)
