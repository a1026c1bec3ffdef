"""How a put is answered: one byte a key, exactly once, no later than the asker waits. Deadlines are looked at by the node's tick."""

from typing import Final

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.protocol.frames import Header
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.session import Session
from kvstore.store.waiting import until_ns

NOT_CONFIRMED: Final = "the put is not confirmed: the master has not recorded it within the deadline. It may be lost: put it again"


class PendingAnswer:
    """An answer that waits for the master. `flags` may change until it is given."""

    __slots__ = ("_answers", "_request_id", "flags", "session", "until_ns")

    def __init__(self, answers: "Answers", session: Session, header: Header, flags: bytearray) -> None:
        self._answers = answers
        self.session = session
        self._request_id = header.request_id
        self.flags = flags
        self.until_ns = until_ns(session, header)

    def is_over(self) -> bool:
        """It has been given."""
        return not self._answers.waits(self)

    def give(self, error: Exception | None) -> None:
        """Answer the request: with the flags as they are now for None, else with the error. Only the first call counts."""
        if not self._answers.take(self):
            return
        if error is None:
            self.session.reply(self._request_id, Flags(bytes(self.flags)))
        else:
            self.session.fail(self._request_id, error)


class Answers:
    """The answers that wait for the master. Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._pending: dict[PendingAnswer, None] = {}
        """In the order in which they were asked for, so that it does not hang on where objects lie in memory who hears first."""
        self._by_session: dict[Session, dict[PendingAnswer, None]] = {}
        """The same. None of them empty."""

    def begin(self, session: Session, header: Header, flags: bytearray) -> PendingAnswer:
        """The answer to the request, to be given later, or by `expire`."""
        answer = PendingAnswer(self, session, header, flags)
        self._pending[answer] = None
        self._by_session.setdefault(session, {})[answer] = None
        return answer

    def waits(self, answer: PendingAnswer) -> bool:
        """Whether it has yet to be given."""
        return answer in self._pending

    def take(self, answer: PendingAnswer) -> bool:
        """Whether it waits still; it does not any more."""
        if answer not in self._pending:
            return False
        del self._pending[answer]
        others = self._by_session[answer.session]
        del others[answer]
        if not others:
            del self._by_session[answer.session]
        return True

    def forget_owner(self, session: Session) -> None:
        """The asker is gone, and so is what waits for him: it would be kept until his deadline, however many come and go."""
        for answer in self._by_session.pop(session, ()):
            del self._pending[answer]

    def expire(self, *, now_ns: int) -> int:
        """Answer those whose time is over; returns how many. What they wait for goes on."""
        late = [answer for answer in self._pending if answer.until_ns <= now_ns]
        for answer in late:
            answer.give(DeadlineExceeded(NOT_CONFIRMED))
        return len(late)

    def __len__(self) -> int:
        return len(self._pending)
