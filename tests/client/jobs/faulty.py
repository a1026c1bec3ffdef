"""A client of a real cluster, before whose calls a test can put a fault: an error, or a wait."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.client.holds import Hold
from kvstore.client.sync import Client
from kvstore.client.views import View
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.retention import Retention

Fault = Callable[[float], object]
"""Called with the call's deadline, before it is passed on; what it raises is what the call raises."""


def raises(error: BaseException) -> Fault:
    def fault(deadline_s: float) -> None:
        raise error

    return fault


class Barrier:
    """A fault that holds calls until they are let go."""

    def __init__(self) -> None:
        self.is_reached = threading.Semaphore(0)
        """Released once by each call that reaches it."""
        self._is_open = threading.Event()

    def __call__(self, deadline_s: float) -> None:
        self.is_reached.release()
        assert self._is_open.wait(60)

    def open(self) -> None:
        self._is_open.set()


class FaultyClient(Client):
    """`calls` names all that were made, and their keys."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.faults: deque[Fault] = deque()
        """For the next calls, one each; calls after them are sound."""
        self.results: list[int | KVStoreError | None] | None = None
        """In place of what the next `get_each_into` finds."""
        self.calls: list[tuple[str, list[bytes]]] = []
        self.released: list[Hold] = []

    def _before(self, name: str, keys: Sequence[bytes], deadline_s: float | None) -> None:
        self.calls.append((name, list(keys)))
        assert deadline_s is not None
        if self.faults:
            self.faults.popleft()(deadline_s)

    def exists_batch(self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None) -> list[bool]:
        self._before("exists", keys, deadline_s)
        return super().exists_batch(keys, hold=hold, deadline_s=deadline_s)

    def match_prefix(self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None) -> int:
        self._before("match", keys, deadline_s)
        return super().match_prefix(keys, hold=hold, deadline_s=deadline_s)

    def get_each_into(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, retention: Retention | None = None, deadline_s: float | None = None
    ) -> list[int | KVStoreError | None]:
        self._before("get", keys, deadline_s)
        if self.results is not None:
            results, self.results = self.results, None
            return results
        return super().get_each_into(keys, buffers, retention=retention, deadline_s=deadline_s)

    def put_batch_from(
        self, keys: Sequence[bytes], values: Sequence[Any], *, deadline_s: float | None = None, **more: Any
    ) -> list[bool | KVStoreError]:
        self._before("put", keys, deadline_s)
        return super().put_batch_from(keys, values, deadline_s=deadline_s, **more)

    def view(self, key: bytes, *, deadline_s: float | None = None) -> View:
        self._before("view", [key], deadline_s)
        return super().view(key, deadline_s=deadline_s)

    def release(self, hold: Hold) -> None:
        self.released.append(hold)
        super().release(hold)
