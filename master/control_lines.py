"""Which call of the control plane is served next, of those that wait in lines, a line for each caller. Pure.

A call takes a place (a thread) from its beginning to its end, and how long that is, is up to its caller: he may say no more than that he
is going to ask. So nobody has all places. Strangers together have a quarter, everybody else who is known at most half, and a quarter is
kept for nodes, without whose heartbeats there is no cluster. Lines are served in turn.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from kvstore.protocol.errors import Full
from kvstore.security.identity import Identity, Kind

MAX_WAITING: Final = 1024
"""Calls of one line; each takes a few KiB, and not its message."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line:
    """`name` is whose; of strangers it is one line."""

    kind: Kind
    name: str = ""


def line_of(identity: Identity, *, joins: bool) -> Line:
    """Where this one's calls wait; `joins`: a call that only nodes may make, which tells who calls where everybody is let in."""
    if identity.kind is Kind.EVERYBODY:
        return Line(Kind.NODE if joins else Kind.EVERYBODY)
    return Line(identity.kind, "" if identity.kind is Kind.STRANGER else identity.name)


@dataclass(slots=True)
class _Calls(Generic[T]):
    waiting: deque[T] = field(default_factory=deque)
    served: int = 0


class Lines(Generic[T]):
    """Not thread-safe."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._lines: dict[Line, _Calls[T]] = {}
        """Next first; none that is empty and not served."""
        self.served = 0

    def add(self, line: Line, call: T) -> None:
        """Have it wait. Raises Full: too many of its line do."""
        calls = self._lines.setdefault(line, _Calls())
        if len(calls.waiting) >= MAX_WAITING:
            raise Full(f"{MAX_WAITING} control calls of yours wait already: wait for an answer")
        calls.waiting.append(call)

    def next(self) -> tuple[Line, T] | None:
        """One that has a place from now on, until `done`; None: nobody waits who may have one."""
        for line, calls in self._lines.items():
            if calls.waiting and self._has_place(line, calls):
                calls.served += 1
                self.served += 1
                self._lines[line] = self._lines.pop(line)
                return line, calls.waiting.popleft()
        return None

    def done(self, line: Line) -> None:
        """A call of that line is over."""
        calls = self._lines[line]
        calls.served -= 1
        self.served -= 1
        if not (calls.served or calls.waiting):
            del self._lines[line]

    def _has_place(self, line: Line, calls: _Calls[T]) -> bool:
        quarter = max(1, self._places // 4)
        if line.kind is Kind.NODE:
            return self.served < self._places
        others = sum(one.served for each, one in self._lines.items() if each.kind is not Kind.NODE)
        most = {Kind.STRANGER: quarter, Kind.EVERYBODY: self._places}.get(line.kind, max(1, self._places // 2))
        return calls.served < most and others < max(1, self._places - quarter) and self.served < self._places
