"""How a put is answered: one byte a key, exactly once, no later than the asker waits. Deadlines are looked at by the node's tick."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.protocol.frames import Header
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.session import Session

DEFAULT_DEADLINE_NS: Final = 10 * 1_000_000_000
"""For a peer that named no deadline."""
EARLY_NS: Final = 200_000_000
"""Deadlines are looked at every tenth of a second: this much before the asker's own, so that it hears the reason instead of silence."""


def until_ns(session: Session, header: Header) -> int:
    """When, in monotonic time, a request that still waits is to be answered with the reason."""
    deadline_ns = header.deadline_ms * 1_000_000 or DEFAULT_DEADLINE_NS
    return session.reactor.now_ns() + deadline_ns - min(deadline_ns // 2, EARLY_NS)


@dataclass(slots=True, eq=False)
class _Waiting:
    session: Session
    request_id: int
    flags: bytearray
    until_ns: int


class Answers:
    """The answers that wait for the master. Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._waiting: set[_Waiting] = set()

    def once(self, session: Session, header: Header, flags: bytearray) -> Callable[[KVStoreError | None], None]:
        """A function that answers the request: with the flags as they are then for None, else with the error.

        Only its first call counts, and none after `expire` has answered DeadlineExceeded.
        """
        waiting = _Waiting(session, header.request_id, flags, until_ns(session, header))
        self._waiting.add(waiting)

        def answer(error: KVStoreError | None) -> None:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                _send(waiting, error)

        return answer

    def expire(self, *, now_ns: int) -> int:
        """Answer those whose time is over; returns how many. What they wait for goes on."""
        late = [waiting for waiting in self._waiting if waiting.until_ns <= now_ns]
        for waiting in late:
            self._waiting.remove(waiting)
            _send(waiting, DeadlineExceeded("the master has not made the blocks durable yet; they are kept, try again"))
        return len(late)

    def __len__(self) -> int:
        return len(self._waiting)


def _send(waiting: _Waiting, error: KVStoreError | None) -> None:
    if error is None:
        waiting.session.reply(waiting.request_id, Flags(bytes(waiting.flags)))
    else:
        waiting.session.fail(waiting.request_id, error)
