"""Messages that a UCX worker moves together, and what has become of them. It posts and waits for nothing: worker.py does."""

import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Message(NamedTuple):
    """One message to be sent or received: the endpoint's method for it, the memory, and the tag."""

    call: Callable[..., Any]
    part: memoryview | bytes
    tag: int


class Operation:
    """Messages posted together. Its fields are guarded by the worker's lock."""

    __slots__ = ("error", "is_interrupted", "messages", "requests", "waiters", "wakeups")

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages = messages
        self.requests: deque[Any] = deque()
        """Those posted and not known to be over, the oldest on the right."""
        self.error: Exception | None = None
        """Why the first one that failed did."""
        self.is_interrupted = False
        """Whoever waits for it has something else to do."""
        self.waiters = 0
        """Threads that sleep until it is over, or until they are to lead."""
        self.wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def settle(self, failures: type[Exception]) -> bool:
        """Forget the requests that are over; whether all are."""
        requests = self.requests
        while requests and requests[-1].completed:
            try:
                requests.pop().check_error()
            except failures as error:
                self.error = self.error or error
        return not requests
