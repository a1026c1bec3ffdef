"""Requests that wait for what a node has too little of now, in lines, first come first served, each until its deadline.

Puts wait for room behind others of their tenant, reads for their turn behind others of their connection. Pure; `now_ns` is passed in.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

from kvstore.protocol.errors import Unavailable
from kvstore.protocol.frames import FrameHeader
from kvstore.rpc.server.session import Session
from kvstore.rpc.tracing import TraceSpan

DEFAULT_DEADLINE_NS: Final = 10 * 1_000_000_000
"""For a peer that named no deadline."""
EARLY_NS: Final = 200_000_000
"""Deadlines are looked at every tenth of a second: this much before the asker's own, so that it hears the reason instead of silence."""


def until_ns(session: Session, header: FrameHeader) -> int:
    """When, in monotonic time, a request that still waits is to be answered with the reason."""
    deadline_ns = header.deadline_ms * 1_000_000 or DEFAULT_DEADLINE_NS
    return session.reactor.now_ns() + deadline_ns - min(deadline_ns // 2, EARLY_NS)


class WaitingRequest(ABC):
    """A request: it waits in `line`, and is forgotten with `owner`, its connection."""

    __slots__ = ("deadline_ns", "line", "owner")

    def __init__(self, line: Hashable, owner: object, deadline_ns: int) -> None:
        self.line = line
        self.owner = owner
        self.deadline_ns = deadline_ns

    @abstractmethod
    def attempt(self) -> bool:
        """Try again: True when it is answered. What it raises goes to `fail`."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Answer with the error."""

    @abstractmethod
    def give_up(self) -> None:
        """The deadline is over: answer with the reason."""


def begin_part(session: Session, header: FrameHeader, name: str) -> TraceSpan | None:
    """What takes a request's time from now on, as a part of its span; None: it is not traced. It is over with the request at the latest."""
    span = session.span(header.request_id)
    return span.begin(f"kvstore.node.{name}") if span is not None else None


class WaitQueue:
    """Of each line only the first is tried: a later, smaller request that overtakes could starve a large one for ever. Lines do not wait
    for one another; the oldest is tried first."""

    def __init__(self, *, max_of_owner: int) -> None:
        """`max_of_owner` requests of one connection wait at most."""
        self._max_of_owner = max_of_owner
        self._lines: dict[Hashable, deque[WaitingRequest]] = {}
        """None of them empty."""
        self._served: set[Hashable] = set()
        """Those whose first is being tried right now."""

    def add(self, waiting: WaitingRequest) -> None:
        """Put it at its line's end. Raises Unavailable when its owner has too many there already."""
        line = self._lines.setdefault(waiting.line, deque())
        if len(line) >= self._max_of_owner and sum(other.owner is waiting.owner for other in line) >= self._max_of_owner:
            raise Unavailable(f"{self._max_of_owner} requests of this connection wait already")
        line.append(waiting)

    def has(self, line: Hashable) -> bool:
        """Whether anyone waits there: those who come now go behind."""
        return line in self._lines

    def retry(self) -> None:
        """Something may have become free: serve each line as far as it goes. An attempt may itself end connections, or call this again."""
        for line in list(self._lines):
            if line not in self._served:
                self._served.add(line)
                try:
                    self._serve(line)
                finally:
                    self._served.discard(line)

    def _serve(self, name: Hashable) -> None:
        while line := self._lines.get(name):
            first = line[0]
            try:
                is_done = first.attempt()
            except Exception as error:
                first.fail(error)
                is_done = True
            if not is_done:
                return
            if line and line[0] is first:  # else its owner has left meanwhile
                line.popleft()
                if not line:
                    del self._lines[name]

    def _keep(self, stays: Callable[[WaitingRequest], bool]) -> None:
        for name, line in list(self._lines.items()):
            kept = [waiting for waiting in line if stays(waiting)]
            line.clear()
            line.extend(kept)
            if not line:
                del self._lines[name]

    def expire(self, *, now_ns: int) -> int:
        """Send away those whose deadline is over; returns how many."""
        late = [waiting for line in self._lines.values() for waiting in line if waiting.deadline_ns <= now_ns]
        if late:
            self._keep(lambda waiting: waiting.deadline_ns > now_ns)
            for waiting in late:
                waiting.give_up()
            self.retry()
        return len(late)

    def forget_owner(self, owner: object) -> None:
        """The asker is gone: nobody is told."""
        if self._lines:
            self._keep(lambda waiting: waiting.owner is not owner)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))
