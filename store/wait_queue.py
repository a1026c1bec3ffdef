"""Queues of requests that wait for a resource, first come first served, until their deadlines.

Puts wait for slots in a queue per tenant, reads for the read limiter in a queue per connection. Pure; `now_ns` is
passed in.
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
"""For requests without a deadline."""
DEADLINE_MARGIN_NS: Final = 200_000_000
"""Deadlines are checked every 0.1 s. A request is answered this long before the client's own deadline, so that the
client gets the reason."""


def until_ns(session: Session, header: FrameHeader) -> int:
    """Monotonic time at which a queued request is answered with an error."""
    deadline_ns = header.deadline_ms * 1_000_000 or DEFAULT_DEADLINE_NS
    return session.reactor.now_ns() + deadline_ns - min(deadline_ns // 2, DEADLINE_MARGIN_NS)


class WaitingRequest(ABC):
    """Queued request. `line` is the key of its queue, `owner` its connection."""

    __slots__ = ("deadline_ns", "line", "owner")

    def __init__(self, line: Hashable, owner: object, deadline_ns: int) -> None:
        self.line = line
        self.owner = owner
        self.deadline_ns = deadline_ns

    @abstractmethod
    def attempt(self) -> bool:
        """Try again; return True once it is answered. Exceptions are passed to `fail`."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Answer with the error."""

    @abstractmethod
    def give_up(self) -> None:
        """Answer with the reason: the deadline is over."""


def begin_child_span(session: Session, header: FrameHeader, name: str) -> TraceSpan | None:
    """Begin a child span of a traced request, which ends with the request at the latest. None if it is not traced."""
    span = session.span(header.request_id)
    return span.begin(f"kvstore.node.{name}") if span is not None else None


class WaitQueue:
    """Queues by key. Only the head of a queue is tried: overtaking by smaller requests could starve a large one. Queues
    are independent; the oldest is tried first."""

    def __init__(self, *, max_of_owner: int) -> None:
        """`max_of_owner`: queued requests of one connection."""
        self._max_of_owner = max_of_owner
        self._lines: dict[Hashable, deque[WaitingRequest]] = {}
        """By key. No empty deques."""
        self._served: set[Hashable] = set()
        """Queues whose head is being tried."""

    def add(self, waiting: WaitingRequest) -> None:
        """Append a request. Raises Unavailable if its owner has too many in the queue."""
        line = self._lines.setdefault(waiting.line, deque())
        if len(line) >= self._max_of_owner and sum(other.owner is waiting.owner for other in line) >= self._max_of_owner:
            raise Unavailable(f"{self._max_of_owner} requests of this connection are queued already: try again later")
        line.append(waiting)

    def has(self, line: Hashable) -> bool:
        """Return True if the queue is not empty: new requests go behind."""
        return line in self._lines

    def retry(self) -> None:
        """Serve each queue as far as possible, after something was freed. Attempts may close connections or call this
        again."""
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
            if line and line[0] is first:  # unless its owner has disconnected meanwhile
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
        """Fail requests whose deadline is over; return their number."""
        late = [waiting for line in self._lines.values() for waiting in line if waiting.deadline_ns <= now_ns]
        if late:
            self._keep(lambda waiting: waiting.deadline_ns > now_ns)
            for waiting in late:
                waiting.give_up()
            self.retry()
        return len(late)

    def forget_owner(self, owner: object) -> None:
        """Drop the requests of a closed connection."""
        if self._lines:
            self._keep(lambda waiting: waiting.owner is not owner)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))
