"""How long requests take from their message to their answer, for whoever wants to know: one stopwatch a session.

As a rule a request is answered before the next one is looked at, which costs two looks at the clock; those that wait for something are kept
by their ids meanwhile.
"""

from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any, Final, Protocol

from kvstore.protocol.errors import KVStoreError

MAX_UNANSWERED: Final = 4096
"""Requests of one peer that are observed while they wait for their answer."""


class Observer(Protocol):
    """Is told what became of requests, in the reactor's thread."""

    @property
    def answered(self) -> Mapping[int, Callable[[int], None]]:
        """By the type of a request's message: to be called with the ns from there to its answer. Each request of a daemon pays for it."""

    @property
    def slow_ns(self) -> int:
        """Requests that took at least so long are reported to `slow`, too. Each request of a daemon pays for the look."""

    def slow(self, peer: "Peer", kind: int, elapsed_ns: int) -> None:
        """A request of that type took so long."""

    def refused(self, error: KVStoreError) -> None:
        """The answer was that error."""


class Peer(Protocol):
    """As much of a Session as an observer of its slow requests needs."""

    @property
    def context(self) -> Any:
        """The handler's own state for the connection."""

    def peer(self) -> str:
        """Its address."""


class Stopwatch:
    """Of one session. The reactor's thread is the only caller."""

    __slots__ = ("_answered", "_begun", "_unanswered", "observer")

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._answered = observer.answered
        self._begun: tuple[int, int, int] | None = None
        """Of the request that is being served: its id, its type, and since when."""
        self._unanswered: dict[int, tuple[int, int, int]] = {}

    def begin(self, request_id: int, kind: int) -> None:
        """A request is there. The one before, if it has no answer yet, gets it later; one without an id never does."""
        begun = self._begun
        if begun is not None and len(self._unanswered) < MAX_UNANSWERED:
            self._unanswered[begun[0]] = begun
        self._begun = (request_id, kind, monotonic_ns()) if request_id else None

    def answered(self, request_id: int) -> tuple[int, int] | None:
        """The request has its answer. Its type and duration in ns, if it was slow."""
        begun = self._begun
        if begun is not None and begun[0] == request_id:
            self._begun = None
        else:
            begun = self._unanswered.pop(request_id, None)
            if begun is None:
                return None
        elapsed_ns = monotonic_ns() - begun[2]
        self._answered[begun[1]](elapsed_ns)
        return (begun[1], elapsed_ns) if elapsed_ns >= self.observer.slow_ns else None
