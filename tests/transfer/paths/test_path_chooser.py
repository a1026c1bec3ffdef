"""Promises of path_chooser.py: the rate of delivery is followed, and slices go by it; on simulated rails with a clock of their own."""

import heapq
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.transfer.config import TransferSettings
from kvstore.transfer.paths.path_chooser import SAMPLE_BYTES, Bandwidth, MeasuredRate, Path, PathChooser, PathFacts

MIB = 1 << 20
SECOND_NS = 1_000_000_000
MS_NS = 1_000_000
GBIT_S = 125e6
"""Bytes per second."""
SETTINGS = TransferSettings(cooldown_s=0.5, cooldown_max_s=8.0, probe_share=0.02, numa_penalty=2.0)
NO_PROBES = TransferSettings(cooldown_s=0.5, cooldown_max_s=8.0, probe_share=0.0, numa_penalty=2.0)


def deliver(bandwidth: Bandwidth, *, bytes_s: float, begin_ns: int, took_s: float, size_bytes: int = MIB) -> int:
    """Slices one after another at this rate, without a pause; returns when that ended."""
    bandwidth.restart(begin_ns)
    now_ns = begin_ns
    for number in range(1, int(took_s * bytes_s / size_bytes) + 1):
        now_ns = begin_ns + int(number * size_bytes / bytes_s * 1e9)
        bandwidth.delivered(size_bytes, now_ns, is_idle=False)
    return now_ns


def test_measured_returns_the_rate_and_its_basis() -> None:
    bandwidth = Bandwidth(1.0)
    assert bandwidth.measured() is None
    bandwidth.restart(0)
    bandwidth.delivered(SAMPLE_BYTES - 1, 1000, is_idle=True)
    assert bandwidth.measured_ns == 1000, "it is at least that fast"
    assert bandwidth.measured() is None, "but nobody knows how fast"
    bandwidth = Bandwidth(1e9)
    bandwidth.delivered(SAMPLE_BYTES, SECOND_NS, is_idle=False)
    assert bandwidth.measured() == MeasuredRate(SAMPLE_BYTES, SAMPLE_BYTES, SECOND_NS)


@pytest.mark.parametrize("size_bytes", [4096, 64 << 10, MIB, 16 * MIB])
def test_the_rate_is_found_whatever_the_size_of_slices(size_bytes: int) -> None:
    bandwidth = Bandwidth(12.5e9)
    deliver(bandwidth, bytes_s=5e8, begin_ns=0, took_s=1.0, size_bytes=size_bytes)
    assert bandwidth.bytes_s == pytest.approx(5e8, rel=0.01)


@pytest.mark.parametrize(("before", "after"), [(5e8, 5e7), (5e7, 5e8)])
def test_a_change_of_rate_is_followed_within_a_second(before: float, after: float) -> None:
    bandwidth = Bandwidth(1e9)
    changed_ns = deliver(bandwidth, bytes_s=before, begin_ns=0, took_s=2.0)
    deliver(bandwidth, bytes_s=after, begin_ns=changed_ns, took_s=1.0)
    assert bandwidth.bytes_s == pytest.approx(after, rel=0.25)


def test_time_with_nothing_in_flight_does_not_count() -> None:
    bandwidth = Bandwidth(1e9)
    for second in range(10):
        bandwidth.restart(second * SECOND_NS)
        bandwidth.delivered(MIB, second * SECOND_NS + 10_000_000, is_idle=True)
    assert bandwidth.bytes_s == pytest.approx(MIB * 100, rel=0.01)


def test_after_a_long_idle_time_one_slice_outweighs_the_past() -> None:
    bandwidth = Bandwidth(1e9)
    ended_ns = deliver(bandwidth, bytes_s=1e9, begin_ns=0, took_s=2.0)
    later_ns = ended_ns + 5 * SECOND_NS
    bandwidth.restart(later_ns)
    bandwidth.delivered(MIB, later_ns + 10_000_000, is_idle=True)
    assert bandwidth.bytes_s == pytest.approx(MIB * 100, rel=0.1)


def test_a_few_bytes_alone_may_raise_the_rate_and_not_lower_it() -> None:
    bandwidth = Bandwidth(1e9)
    ended_ns = deliver(bandwidth, bytes_s=1e8, begin_ns=0, took_s=1.0)
    few_bytes = SAMPLE_BYTES - 1
    bandwidth.restart(ended_ns)
    bandwidth.delivered(few_bytes, ended_ns + SECOND_NS, is_idle=True)
    assert bandwidth.bytes_s == pytest.approx(1e8)
    bandwidth.restart(ended_ns + SECOND_NS)
    bandwidth.delivered(few_bytes, ended_ns + SECOND_NS + 1000, is_idle=True)
    assert bandwidth.bytes_s > 1.01e8


def path(rail: str, transport: str = "tcp") -> Path:
    return Path(transport, rail, rail)


A, B, C = path("a"), path("b"), path("c")


def chooser(*paths: Path, settings: TransferSettings = NO_PROBES, speed_bytes_s: float = GBIT_S) -> PathChooser:
    made = PathChooser(settings, random.Random(1))
    made.set_paths({path: PathFacts(speed_bytes_s=speed_bytes_s) for path in paths})
    return made


def fail(paths: PathChooser, failing: Path, now_ns: int) -> None:
    paths.begun(failing, MIB, now_ns)
    paths.failed(failing, MIB, now_ns)


@dataclass
class Rails:
    """Rails that deliver slices one after another, each at its rate, to a sender that keeps so many under way."""

    paths: PathChooser
    rates: dict[Path, float]
    window: int = 18
    stall_ns: int = 500 * MS_NS
    now_ns: int = 0
    delivered: dict[Path, int] = field(default_factory=dict)
    failures: int = 0
    in_flight: list[tuple[int, int, Path, int, bool]] = field(default_factory=list)
    free_ns: dict[Path, int] = field(default_factory=dict)
    serial: int = 0

    def run(self, seconds: float, size_bytes: int = MIB) -> dict[Path, int]:
        """Bytes delivered by path in this time."""
        self.delivered = dict.fromkeys(self.rates, 0)
        end_ns = self.now_ns + int(seconds * SECOND_NS)
        while self.now_ns < end_ns:
            while len(self.in_flight) < self.window and self.begin(size_bytes):
                pass
            wakeup_ns = self.paths.next_wakeup_ns() if len(self.in_flight) < self.window else None
            next_ns = min([at_ns for at_ns, *_ in self.in_flight[:1]] + ([] if wakeup_ns is None else [wakeup_ns]))
            self.now_ns = max(self.now_ns, next_ns)
            while self.in_flight and self.in_flight[0][0] <= self.now_ns:
                self.end(size_bytes)
            self.paths.check_integrity()
        return self.delivered

    def begin(self, size_bytes: int) -> bool:
        chosen = self.paths.choose(size_bytes, self.now_ns)
        if chosen is None:
            return False
        self.paths.begun(chosen, size_bytes, self.now_ns)
        rate, self.serial = self.rates[chosen], self.serial + 1
        if rate:
            begin_ns = max(self.now_ns, self.free_ns.get(chosen, 0))
            self.free_ns[chosen] = done_ns = begin_ns + int(size_bytes / rate * 1e9)
        else:
            done_ns = self.now_ns + self.stall_ns
        heapq.heappush(self.in_flight, (done_ns, self.serial, chosen, self.now_ns, bool(rate)))
        return True

    def end(self, size_bytes: int) -> None:
        _, _, chosen, begun_ns, works = heapq.heappop(self.in_flight)
        if works:
            self.paths.succeeded(chosen, size_bytes, begun_ns, self.now_ns)
            self.delivered[chosen] += size_bytes
        else:
            self.paths.failed(chosen, size_bytes, self.now_ns)
            self.failures += 1


SHAPED = {A: 1 * GBIT_S, B: 2 * GBIT_S, C: 4 * GBIT_S}


@pytest.mark.parametrize("speed_bytes_s", [0.0, 10 * GBIT_S])
@pytest.mark.parametrize("size_bytes", [64 << 10, MIB, 4 * MIB])
def test_rails_are_used_in_proportion_to_their_speed(speed_bytes_s: float, size_bytes: int) -> None:
    rails = Rails(chooser(*SHAPED, settings=SETTINGS, speed_bytes_s=speed_bytes_s), SHAPED)
    delivered = rails.run(2.0, size_bytes)
    assert sum(delivered.values()) >= 0.9 * 2.0 * sum(SHAPED.values())
    for rail, rate in SHAPED.items():
        assert delivered[rail] / sum(delivered.values()) == pytest.approx(rate / sum(SHAPED.values()), rel=0.1)
        assert rails.paths.states[rail].bandwidth.bytes_s == pytest.approx(rate, rel=0.1)


def test_a_changed_speed_changes_the_share_within_a_second() -> None:
    rails = Rails(chooser(*SHAPED, settings=SETTINGS), dict(SHAPED))
    rails.run(2.0)
    rails.rates[C] = 0.5 * GBIT_S
    rails.run(1.0)
    delivered = rails.run(2.0)
    assert sum(delivered.values()) >= 0.9 * 2.0 * 3.5 * GBIT_S
    rails.rates[C] = 4 * GBIT_S
    rails.run(1.0)
    delivered = rails.run(2.0)
    assert sum(delivered.values()) >= 0.9 * 2.0 * 7 * GBIT_S


def test_a_failed_rails_share_goes_to_the_others() -> None:
    rails = Rails(chooser(*SHAPED, settings=SETTINGS), dict(SHAPED))
    rails.run(2.0)
    rails.rates[C] = 0.0
    rails.run(0.6)
    delivered = rails.run(4.0)
    assert sum(delivered.values()) >= 0.9 * 4.0 * 3 * GBIT_S
    failures_before = rails.failures
    rails.run(8.0)
    assert rails.failures - failures_before <= 3  # one slice a cool-down, and those grow
    rails.rates[C] = 4 * GBIT_S
    rails.run(8.6)
    delivered = rails.run(1.0)
    assert delivered[C] / sum(delivered.values()) == pytest.approx(4 / 7, rel=0.1)


def test_when_all_rails_stop_they_are_tried_at_the_wake_ups() -> None:
    rails = Rails(chooser(A, B), {A: 0.0, B: 0.0}, window=4)
    rails.run(5.0)
    assert rails.delivered == {A: 0, B: 0}
    rails.rates = {A: GBIT_S, B: GBIT_S}
    rails.run(8.6)
    assert sum(rails.run(1.0).values()) >= 0.9 * 2 * GBIT_S


def test_numa_penalty_applies_to_each_end() -> None:
    paths = PathChooser(NO_PROBES, random.Random(1))
    paths.set_paths({A: PathFacts(speed_bytes_s=3.9 * GBIT_S), B: PathFacts(speed_bytes_s=GBIT_S)})
    assert paths.choose(MIB, 0, unpreferred_ends={A: 2, B: 0}) == B
    assert paths.choose(MIB, 0, unpreferred_ends={A: 1, B: 0}) == A
    assert paths.choose(MIB, 0) == A


def test_a_less_preferred_transport_is_used_only_as_fallback() -> None:
    fabric, tcp = path("a", "ucx"), path("a", "tcp")
    paths = PathChooser(SETTINGS, random.Random(1))
    paths.set_paths({tcp: PathFacts(1, speed_bytes_s=99 * GBIT_S), fabric: PathFacts(0, speed_bytes_s=GBIT_S)})
    for _ in range(200):
        assert paths.choose(MIB, 0) == fabric
        paths.begun(fabric, MIB, 0)
    paths.failed(fabric, MIB, 0)
    assert paths.choose(MIB, 1) == tcp
    assert paths.choose(MIB, 0, excluding={fabric}) == tcp
    assert paths.choose(MIB, 0, excluding={fabric, tcp}) is None


def test_probes_go_to_the_path_that_was_not_measured_for_longest() -> None:
    paths = PathChooser(TransferSettings(probe_share=0.5), random.Random(1))
    paths.set_paths({A: PathFacts(speed_bytes_s=99 * GBIT_S), B: PathFacts(speed_bytes_s=GBIT_S), C: PathFacts(speed_bytes_s=GBIT_S)})
    chosen = []
    for number in range(400):
        one = paths.choose(MIB, number * SECOND_NS)
        assert one is not None
        paths.begun(one, MIB, number * SECOND_NS)
        took_ns = int(MIB / paths.states[one].facts.speed_bytes_s * 1e9)
        paths.succeeded(one, MIB, number * SECOND_NS, number * SECOND_NS + took_ns)
        chosen.append(one)
    probes = [one for one in chosen if one != A]
    assert len(probes) == pytest.approx(200, rel=0.15)
    assert probes[:4] == [B, C, B, C]
    assert all(first != second for first, second in pairwise(probes))


def test_a_path_rests_for_twice_as_long_each_time_up_to_a_limit() -> None:
    paths, now_ns = chooser(A), 0
    for rest_s in (0.5, 1, 2, 4, 8, 8, 8):
        fail(paths, A, now_ns)
        until_ns = now_ns + int(rest_s * SECOND_NS)
        assert paths.next_wakeup_ns() == until_ns
        assert paths.choose(MIB, until_ns - 1) is None
        now_ns = until_ns
        assert paths.choose(MIB, now_ns) == A


def test_after_a_cooldown_one_slice_probes_the_path() -> None:
    paths = chooser(A, B)
    fail(paths, A, 0)
    assert {paths.choose(MIB, MS_NS) for _ in range(4)} == {B}
    now_ns = SECOND_NS
    assert paths.choose(MIB, now_ns) == A
    paths.begun(A, MIB, now_ns)
    assert paths.next_wakeup_ns() is None
    assert {paths.choose(MIB, now_ns) for _ in range(4)} == {B}
    paths.cancelled(A, MIB)
    assert paths.choose(MIB, now_ns) == A
    paths.begun(A, MIB, now_ns)
    paths.succeeded(A, MIB, now_ns, now_ns + MS_NS)
    assert paths.next_wakeup_ns() is None
    assert {paths.choose(MIB, now_ns) for _ in range(4)} == {A}  # it was found fast
    fail(paths, A, 2 * SECOND_NS)
    assert paths.next_wakeup_ns() == 2 * SECOND_NS + SECOND_NS // 2


def test_a_slice_begun_before_the_failure_does_not_end_the_rest() -> None:
    paths = chooser(A)
    paths.begun(A, MIB, 0)
    fail(paths, A, 10)
    paths.succeeded(A, MIB, 0, 20)
    assert paths.choose(MIB, 30) is None


def test_what_was_learnt_of_paths_that_stay_is_kept() -> None:
    paths = chooser(A, B)
    paths.begun(A, MIB, 0)
    paths.succeeded(A, MIB, 0, MS_NS)
    learnt = paths.states[A].bandwidth.bytes_s
    paths.set_paths({A: PathFacts(speed_bytes_s=GBIT_S), C: PathFacts()})
    assert set(paths.states) == {A, C}
    assert paths.states[A].bandwidth.bytes_s == learnt
    assert paths.states[A].facts == PathFacts(speed_bytes_s=GBIT_S)
    paths.remove(B)
    paths.check_integrity()


def test_a_removed_path_is_forgotten_after_its_last_slice() -> None:
    paths = chooser(A)
    for _ in range(3):
        paths.begun(A, MIB, 0)
    paths.set_paths({})
    assert paths.choose(MIB, 0) is None
    paths.succeeded(A, MIB, 0, MS_NS)
    paths.add(A, PathFacts())
    assert paths.choose(MIB, MS_NS) == A
    assert paths.states[A].delivered_slices == 1
    paths.remove(A)
    paths.failed(A, MIB, MS_NS)
    assert paths.next_wakeup_ns() is None
    paths.cancelled(A, MIB)
    assert not paths.states
    paths.check_integrity()


def test_total_bandwidth_is_measured_while_any_path_is_busy() -> None:
    paths = chooser(A, B)
    for begun_ns in (0, 10 * SECOND_NS):  # idle in between
        paths.begun(A, 1 << 20, begun_ns)
        paths.begun(B, 1 << 20, begun_ns)
        paths.succeeded(A, 1 << 20, begun_ns, begun_ns + SECOND_NS)
        paths.succeeded(B, 1 << 20, begun_ns, begun_ns + SECOND_NS)
    measured = paths.bandwidth.measured()
    assert measured is not None
    assert measured.bytes_s == pytest.approx(2 << 20, rel=1e-6)
    assert measured.measured_ns == 11 * SECOND_NS
    paths.begun(A, 1 << 20, 20 * SECOND_NS)
    paths.begun(A, 1 << 20, 20 * SECOND_NS)
    paths.failed(A, 1 << 20, 29 * SECOND_NS)
    paths.succeeded(A, 1 << 20, 20 * SECOND_NS, 30 * SECOND_NS)
    measured = paths.bandwidth.measured()
    assert measured is not None
    assert measured.bytes_s == pytest.approx(1 << 20, rel=1e-6), "what failed, and its time, count for nothing"


class AgainstList(RuleBasedStateMachine):
    """In any schedule the slices in flight equal a plain list's, and paths are usable as specified."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = PathChooser(SETTINGS, random.Random(1))
        self.slices: list[tuple[Path, int, int]] = []
        self.now_ns = 0

    @rule(rails=st.sets(st.sampled_from([A, B, C, path("a", "ucx")])))
    def change(self, rails: set[Path]) -> None:
        self.paths.set_paths({one: PathFacts(preference=one.transport == "tcp") for one in rails})
        assert {one for one, state in self.paths.states.items() if state.is_present} == rails

    @rule(size_bytes=st.integers(0, 1 << 24), excluding=st.sets(st.sampled_from([A, B, C])))
    def begin(self, size_bytes: int, excluding: set[Path]) -> None:
        chosen = self.paths.choose(size_bytes, self.now_ns, excluding=excluding)
        usable = [state for one, state in self.paths.states.items() if state.is_present and one not in excluding]
        usable = [state for state in usable if state.is_usable(self.now_ns)]
        assert (chosen is None) == (not usable)
        if chosen is not None:
            assert chosen not in excluding
            assert self.paths.states[chosen].facts.preference == min(state.facts.preference for state in usable)
            self.paths.begun(chosen, size_bytes, self.now_ns, is_retry=bool(excluding))
            self.slices.append((chosen, size_bytes, self.now_ns))

    @precondition(lambda self: self.slices)
    @rule(data=st.data(), how=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def end(self, data: st.DataObject, how: str) -> None:
        one, size_bytes, begun_ns = self.slices.pop(data.draw(st.integers(0, len(self.slices) - 1)))
        if how == "succeeded":
            self.paths.succeeded(one, size_bytes, begun_ns, self.now_ns)
        elif how == "failed":
            self.paths.failed(one, size_bytes, self.now_ns)
        else:
            self.paths.cancelled(one, size_bytes)

    @rule(step_ns=st.integers(0, 10 * SECOND_NS))
    def wait(self, step_ns: int) -> None:
        self.now_ns += step_ns

    @invariant()
    def in_flight_is_what_the_list_holds(self) -> None:
        self.paths.check_integrity()
        for one, state in self.paths.states.items():
            sizes = [size_bytes for other, size_bytes, _ in self.slices if other == one]
            assert (state.in_flight_slices, state.in_flight_bytes) == (len(sizes), sum(sizes))
        assert {one for one, _, _ in self.slices} <= set(self.paths.states)


TestAgainstList = AgainstList.TestCase
TestAgainstList.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)
