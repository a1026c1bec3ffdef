"""Requests whose beginning is being fetched from a store, one at a time in a thread of its own; then senders are asked for the rest."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvstore.handover.handles import Receiving
from kvstore.protocol.errors import KVStoreError
from kvstore.rpc.reactor import Reactor

log = logging.getLogger("kvstore.handover")

Then = Callable[[int, KVStoreError | None], None]
"""Called in the reactor's thread: how many tokens are there, and why the request has failed meanwhile, if it has."""


class Fetching:
    """See the module. Not thread-safe: the reactor's thread is the only caller, but of `close`.

    A fetch under way is not broken off, for it writes into the request's blocks: a request that fails meanwhile is over after it.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-prefix")
        self._requests: dict[bytes, tuple[Receiving, KVStoreError | None]] = {}

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._requests

    def handles(self) -> list[Receiving]:
        """Of the requests that are being fetched."""
        return [handle for handle, _ in self._requests.values()]

    def begin(self, handle: Receiving, fetch: Callable[[], int], then: Then) -> None:
        """Run `fetch` in the thread, which returns how many tokens there are; a store that breaks has none."""
        self._requests[handle.request_id] = (handle, None)

        def fetched(tokens: int) -> None:
            _, error = self._requests.pop(handle.request_id)
            then(tokens, error)

        def run() -> None:
            tokens = 0
            try:
                tokens = fetch()
            except Exception:
                log.exception("a store of prefixes failed")
            self._reactor.call_soon(lambda: fetched(tokens))

        self._thread.submit(run)

    def fail(self, request_id: bytes, error: KVStoreError) -> bool:
        """It has failed; False if it is not here."""
        found = self._requests.get(request_id)
        if found is not None and found[1] is None:
            self._requests[request_id] = (found[0], error)
        return found is not None

    def close(self) -> None:
        """For any thread; waits for a fetch under way."""
        self._thread.shutdown(wait=True)
