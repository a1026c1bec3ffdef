"""Promises of waits.py: who waits is due once all that he waits for is undecided no more, as if each were counted by itself."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.store.blocks.undecided import SPARE, Waits, never


def test_who_was_answered_meanwhile_is_forgotten_and_others_still_wait_for_what_he_waited_for() -> None:
    waits, due = Waits(), list[int]()

    def add(number: int) -> None:
        waits.add(number, number, lambda: due.append(number), lambda: number != 10)

    for number in range(1, 20 * SPARE):
        add(number)
    assert waits._count <= 2 * SPARE
    for numbers in (range(1, 10), [10]):
        assert due == []
        for callback in waits.take_off(numbers):
            callback()
    assert due == [10]


def test_where_nobody_waits_any_more_nothing_is_counted() -> None:
    waits = Waits()
    for number in range(1, SPARE + 1):
        waits.add(number, number, lambda: None, lambda: True)
    waits._forget_over()
    assert not waits
    waits.check_integrity(range(1, 9))
    assert waits.take_off([1, 2]) == []
    due: list[str] = []
    waits.add(SPARE, SPARE - 2, lambda: due.append("all"), never)
    for callback in waits.take_off(range(3, SPARE + 1)):
        callback()
    assert due == ["all"]


class AgainstSets(RuleBasedStateMachine):
    """Each wait a set of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = Waits()
        self.undecided: list[int] = []
        self.last = 0
        self.sets: dict[int, set[int]] = {}
        self.over: set[int] = set()
        self.due: set[int] = set()
        self.names = 0

    @rule(count=st.integers(1, 4))
    def put(self, count: int) -> None:
        self.undecided += range(self.last + 1, self.last + count + 1)
        self.last += count + 1

    @precondition(lambda self: self.undecided)
    @rule(times=st.integers(1, 3))
    def wait(self, times: int) -> None:
        for _ in range(times):
            name = self.names = self.names + 1
            self.sets[name] = set(self.undecided)
            self.waits.add(self.last, len(self.undecided), self._told(name), lambda name=name: name in self.over)  # type: ignore[misc]

    def _told(self, name: int) -> Callable[[], None]:
        return lambda: self.due.add(name)

    @precondition(lambda self: self.undecided)
    @rule(data=st.data())
    def decide(self, data: Any) -> None:
        numbers = data.draw(st.lists(st.sampled_from(self.undecided), unique=True, min_size=1))
        self.undecided = [number for number in self.undecided if number not in numbers]
        for callback in self.waits.take_off(numbers):
            callback()
        for waited in self.sets.values():
            waited.difference_update(numbers)

    @precondition(lambda self: self.sets)
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        self.over.add(data.draw(st.sampled_from(sorted(self.sets))))

    @rule()
    def forget(self) -> None:
        self.waits._forget_over()

    @invariant()
    def agrees(self) -> None:
        self.waits.check_integrity(self.undecided)
        expected = {name for name, waited in self.sets.items() if not waited}
        assert expected - self.over <= self.due <= expected


TestAgainstSets = AgainstSets.TestCase
