"""Tests of wait_queue.py: first come first served per queue, deadlines, and no attempts after an owner has ended."""

from collections.abc import Callable

import pytest

from kvstore.store.wait_queue import WaitingRequest, WaitQueue


class Asker(WaitingRequest):
    """Writes down what happens to it. Its attempts succeed once it is named in its room's `lucky`; `meanwhile` runs within them."""

    def __init__(self, line: "Line", name: str, tenant: str, owner: object, deadline_ns: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(tenant, owner, deadline_ns)
        self._room = line
        self._name = name
        self._meanwhile = meanwhile

    def attempt(self) -> bool:
        self._room.log.append(f"try {self._name}")
        self._meanwhile()
        return self._name in self._room.lucky

    def fail(self, error: Exception) -> None:
        self._room.log.append(f"fail {self._name}: {error}")

    def give_up(self) -> None:
        self._room.log.append(f"late {self._name}")


class Line:
    """A room, and what happened to those who wait in it."""

    def __init__(self) -> None:
        self.room = WaitQueue(max_of_owner=3)
        self.lucky = ""
        self.log: list[str] = []

    def add(
        self,
        name: str,
        *,
        tenant: str = "red",
        owner: object = None,
        deadline_ns: int = 100,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.room.add(Asker(self, name, tenant, owner or name, deadline_ns, meanwhile))

    def said(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_only_the_head_of_a_queue_is_tried() -> None:
    line = Line()
    line.add("a")
    line.add("b")
    line.lucky = "b"
    line.room.retry()
    assert line.said() == ["try a"]
    line.lucky = "ab"
    line.room.retry()
    assert line.said() == ["try a", "try b"]
    assert len(line.room) == 0
    line.room.retry()
    assert line.said() == []


@pytest.mark.promise("tenant-quotas")
def test_queues_are_independent_and_the_oldest_is_tried_first() -> None:
    line = Line()
    for name, tenant in (("a", "red"), ("b", "blue"), ("c", "red"), ("d", "green")):
        line.add(name, tenant=tenant)
    assert [line.room.has(tenant) for tenant in ("red", "blue", "green", "grey")] == [True, True, True, False]
    line.lucky = "bc"
    line.room.retry()
    assert line.said() == ["try a", "try b", "try d"]
    assert (line.room.has("blue"), len(line.room)) == (False, 3)
    line.lucky = "acd"
    line.room.retry()
    assert line.said() == ["try a", "try c", "try d"]
    assert len(line.room) == 0


def test_an_owner_that_ends_in_its_attempt_removes_no_other() -> None:
    line = Line()
    line.add("a", owner="me", meanwhile=lambda: line.room.forget_owner("me"))
    line.add("b")
    line.lucky = "a"
    line.room.retry()
    assert line.said() == ["try a", "try b"]
    assert len(line.room) == 1


@pytest.mark.promise("failures-typed")
def test_a_raising_attempt_fails_only_its_request() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    line = Line()
    line.add("a", meanwhile=fail)
    line.add("b")
    line.lucky = "b"
    line.room.retry()
    assert line.said() == ["try a", "fail a: a bug", "try b"]
    assert len(line.room) == 0


def test_an_attempt_may_call_retry() -> None:
    """An answer that cannot be sent closes its connection, which frees slots: others are served from within."""
    line = Line()

    def meanwhile() -> None:
        line.room.forget_owner("gone")
        line.room.retry()

    line.add("a", meanwhile=meanwhile)
    line.add("b", owner="gone")
    line.add("c")
    line.lucky = "abc"
    line.room.retry()
    assert line.said() == ["try a", "try c"]
    assert len(line.room) == 0
