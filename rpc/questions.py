"""What one end of a session has asked the other, by id, until it is answered, its time is over or the connection is. Sans-I/O."""

import logging
from collections.abc import Callable

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, from_code
from kvstore.protocol.frames import Header
from kvstore.protocol.session_messages import Failure
from kvstore.rpc.deadline import seconds_shown
from kvstore.rpc.reactor import Reactor, Timer

log = logging.getLogger("kvstore.transfer")

Reply = Callable[["Header | None", "memoryview | KVStoreError"], None]
"""Called once with a request's answer: (header, body) or (None, the error). The body is valid during the call only."""


class Questions:
    """See the module. The reactor's thread is the only caller."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._waiting: dict[int, tuple[Reply, Timer]] = {}
        self._next_id = 1

    def ask(self, on_reply: Reply, deadline_s: float) -> int:
        """The id of a question, which gets DeadlineExceeded when nothing else has come until then."""
        number = self._next_id
        self._next_id = number % 0xFFFFFFFF + 1

        def expired() -> None:
            self._waiting.pop(number, None)
            on_reply(None, DeadlineExceeded(f"the peer did not answer within {seconds_shown(deadline_s)}"))

        self._waiting[number] = (on_reply, self._reactor.call_later(deadline_s, expired))
        return number

    def answered(self, header: Header, body: memoryview, failure: Failure | None) -> bool:
        """Tell who waits for this answer. False: nobody does, or no more. Raises ProtocolError: it cannot be understood."""
        waiting = self._waiting.pop(header.request_id, None)
        if waiting is None:
            return False
        on_reply, timer = waiting
        timer.cancel()
        try:
            if failure is not None:
                on_reply(None, from_code(failure.code, failure.text))
            else:
                on_reply(header, body)
        except ProtocolError:
            raise
        except Exception:
            log.exception("the receiver of an answer of type %d failed", header.type)
        return True

    def close(self, error: KVStoreError) -> None:
        """All that is waited for fails with `error`."""
        waiting, self._waiting = self._waiting, {}
        for on_reply, timer in waiting.values():
            timer.cancel()
            self._reactor.guarded(on_reply, None, error)
