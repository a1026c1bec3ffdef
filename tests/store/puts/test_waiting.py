"""Promises of waiting.py: first come first served within a tenant, each until its deadline, and nobody is asked after it has left."""

from kvstore.store.puts.waiting import Waiting, WaitingRoom


class Line:
    """A room whose waiting ones succeed once they are named in `lucky`."""

    def __init__(self) -> None:
        self.room = WaitingRoom()
        self.lucky = ""
        self.log: list[str] = []

    def add(self, name: str, *, tenant: str = "red", owner: object = None, deadline_ns: int = 100) -> None:
        def attempt() -> bool:
            self.log.append(f"try {name}")
            return name in self.lucky

        self.room.add(Waiting(tenant, owner, deadline_ns, attempt, lambda: self.log.append(f"late {name}")))

    def said(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_the_first_is_tried_and_nobody_overtakes() -> None:
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


def test_nobody_waits_behind_another_tenant_and_the_tenant_that_waits_longest_is_tried_first() -> None:
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


def test_who_leaves_during_its_own_attempt_takes_nobody_along() -> None:
    line = Line()

    def attempt() -> bool:
        line.room.forget_owner("me")
        return True

    line.room.add(Waiting("red", "me", 100, attempt, lambda: None))
    line.add("b")
    line.room.retry()
    assert line.said() == ["try b"]
    assert len(line.room) == 1


def test_whose_deadline_is_over_hears_so_and_the_next_is_tried() -> None:
    line = Line()
    line.add("a", deadline_ns=10)
    line.add("b", deadline_ns=50)
    line.add("c", deadline_ns=10)
    line.lucky = "b"
    assert line.room.expire(now_ns=9) == 0
    assert line.said() == []
    assert line.room.expire(now_ns=10) == 2
    assert line.said() == ["late a", "late c", "try b"]
    assert len(line.room) == 0


def test_an_owner_that_is_gone_is_neither_tried_nor_told() -> None:
    line = Line()
    line.add("a", owner="x")
    line.add("b", owner="y")
    line.room.forget_owner("x")
    line.lucky = "ab"
    line.room.retry()
    assert line.room.expire(now_ns=1000) == 0
    assert line.said() == ["try b"]


def test_an_attempt_may_call_the_room_again() -> None:
    """An answer that cannot be sent ends its connection, which frees room: the others are served from within."""
    line = Line()

    def attempt() -> bool:
        line.log.append("try a")
        line.room.forget_owner("gone")
        line.room.retry()
        return True

    line.room.add(Waiting("red", None, 100, attempt, lambda: None))
    line.add("b", owner="gone")
    line.add("c")
    line.lucky = "bc"
    line.room.retry()
    assert line.said() == ["try a", "try c"]
    assert len(line.room) == 0
