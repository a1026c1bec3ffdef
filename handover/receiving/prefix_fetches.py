"""Fetches of requests' prefixes from a store, one at a time in a separate thread, before senders are asked for the
rest.

A fetch and its queueing get a share of the request's time, because the senders have everything and need time to send it
if the store hangs.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvstore.handover.handles import ReceiveHandle
from kvstore.handover.movements.movement import MovementEnd, OnEnd
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.thread_pools import submit_once

log = logging.getLogger("kvstore.handover")

LEAST_S: Final = 0.001
"""A fetch with less time left is not started."""

Fetch = Callable[[float], int]
"""Fetches into the request's blocks within the given seconds; returns how many tokens are there then."""
Then = Callable[[int, KVStoreError | None, bool], None]
"""Called in the reactor's thread: tokens that are there, the request's error if it failed meanwhile, and whether it
is fenced."""


class _FetchTask:
    """One fetch, as a Movement. `cancel` removes a queued fetch; a running one cannot be interrupted."""

    def __init__(self, reactor: Reactor, thread: ThreadPoolExecutor, fetch: Fetch, *, deadline_ns: int) -> None:
        self._reactor = reactor
        self._thread = thread
        self._fetch = fetch
        self._deadline_ns = deadline_ns
        self._on_end: OnEnd
        self._future: Future[None] | None = None
        self.tokens = 0

    def begin(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._future = submit_once(self._thread, self._run)
        if self._future is None:  # no thread is available: a miss
            self._reactor.call_soon(lambda: on_end(None))

    def cancel(self) -> None:
        if self._future is not None and self._future.cancel():
            self._on_end(None)

    def _run(self) -> None:
        try:
            left_s = (self._deadline_ns - self._reactor.now_ns()) / 1e9
            if left_s >= LEAST_S:
                self.tokens = self._fetch(left_s)
        except BaseException:  # any error of a store is a miss
            log.exception("a store of prefixes failed")
        self._reactor.call_soon(lambda: self._on_end(None))


@dataclass(slots=True, eq=False)
class _FetchRequest:
    handle: ReceiveHandle
    fetching: _FetchTask
    ending: MovementEnd
    until_ns: int
    """Deadline of its fetch."""
    error: KVStoreError | None = None


class PrefixFetches:
    """Requests whose prefix is being fetched. The reactor's thread only, except `close`.

    A request that fails meanwhile is over once its fetch cannot write its blocks any more: at once while it is queued,
    else when the fetch has ended. If a store exceeds the deadline by `fence_timeout_s`, the request is over and not
    fenced.
    """

    def __init__(self, reactor: Reactor, fence_timeout_s: float, share: float) -> None:
        """Start the thread. `share`: share of a request's time for its fetch."""
        self._reactor = reactor
        self._fence_timeout_s = fence_timeout_s
        self._share = share
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-prefix")
        self._requests: dict[bytes, _FetchRequest] = {}

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._requests

    def handles(self) -> list[ReceiveHandle]:
        """Return the handles of requests being fetched."""
        return [request.handle for request in self._requests.values()]

    def begin(self, handle: ReceiveHandle, fetch: Fetch, then: Then, *, deadline_ns: int) -> None:
        """Queue `fetch`. A store that fails, or a fetch that does not start in time, is a miss."""
        request_id, now_ns = handle.request_id, self._reactor.now_ns()
        until_ns = now_ns + int(self._share * (deadline_ns - now_ns))

        def over(is_fenced: bool) -> None:
            too_late.cancel()
            del self._requests[request_id]
            then(fetching.tokens, request.error, is_fenced)

        fetching = _FetchTask(self._reactor, self._thread, fetch, deadline_ns=until_ns)
        ending = MovementEnd(self._reactor, self._fence_timeout_s, over)
        request = self._requests[request_id] = _FetchRequest(handle, fetching, ending, until_ns)
        late = DeadlineExceeded(f"request {request_id!r}: its prefix was not fetched from the store by its deadline")
        ending.expire_at(deadline_ns, lambda: self._fail(request, late))
        too_late = self._reactor.call_at(until_ns, fetching.cancel)
        ending.track(fetching, lambda _: ending.begin([], is_failed=False))

    def fail(self, request_id: bytes, error: KVStoreError) -> bool:
        """Fail a request; return False if it is unknown."""
        request = self._requests.get(request_id)
        if request is not None:
            self._fail(request, error)
        return request is not None

    def _fail(self, request: _FetchRequest, error: KVStoreError) -> None:
        if request.error is None:
            request.error = error
            request.ending.begin([], is_failed=True, moves_until_ns=request.until_ns)

    def close(self) -> None:
        """Wait for the fetches of requests that have not failed. Any thread may call it. A second close is a no-op."""
        self._thread.shutdown(wait=True)
