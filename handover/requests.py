"""All requests of one rank on both sides: begun by local callers, joined by other ranks, ended by the first failure.

The reactor's thread makes all calls. sending/ and receiving/ carry out the transfers.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from numpy.typing import NDArray

from kvstore.handover.description import RankInfo, RemoteExecutor
from kvstore.handover.handles import Handover, ReceiveHandle, SendHandle
from kvstore.handover.movements.staging_buffers import StagingPool
from kvstore.handover.prefix import RankPrefixStore, fetch_prefix
from kvstore.handover.ranks.completion_tracker import CompletionCoordinator
from kvstore.handover.ranks.rank_connections import Answer, RankConnections
from kvstore.handover.receiving.prefix_fetches import PrefixFetches
from kvstore.handover.receiving.side import ReceiveRequest, ReceiverSide
from kvstore.handover.resources import RankResources, RankSetup
from kvstore.handover.sending.side import SenderSide
from kvstore.protocol.errors import Cancelled, Closed, InvalidArgument, KVStoreError, ProtocolError, from_code, typed
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.handover_messages import CancelRequest, ExportRegions, PartReady, RankReport, ReadsDone, RequestCache, RequestEnded
from kvstore.protocol.message import Message
from kvstore.rpc.address import parse_address
from kvstore.rpc.reactor import Reactor
from kvstore.security.tls.certificates import Certificates

FETCH_SHARE: Final = 0.25
"""Share of a request's time for fetching its prefix from the store, including queueing; then senders are asked."""
COPY_THREADS: Final = 1
"""Threads that gather, scatter and submit transfers."""

log = logging.getLogger("kvstore.handover")


class RankRequests:
    """Requests of a rank. Owns its connections, workers and staging. Not thread-safe, except `starting`."""

    def __init__(self, setup: RankSetup, reactor: Reactor, instance: bytes) -> None:
        """Listen for other ranks. Raises ConfigError: the address cannot be used."""
        layout, rank, regions, engine, settings, store = setup
        tls = Certificates.of_peer(settings, "a rank of a hand-over")
        self.connections = RankConnections(reactor, settings, instance, self, tls)
        self.executor = CompletionCoordinator(layout.parallel, rank, reactor, self.connections, self.fail)
        self.resources = RankResources(
            layout=layout,
            rank=rank,
            regions=regions,
            engine=engine,
            settings=settings,
            reactor=reactor,
            worker=ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvstore-handover"),
            staging=StagingPool(settings.staging_bytes),
            connections=self.connections,
            begun=self.executor.begun,
            over=self.executor.over,
        )
        self._store = store
        self.sender, self.receiver = SenderSide(self.resources), ReceiverSide(self.resources)
        self.fetches = PrefixFetches(reactor, settings.fence_timeout_s, FETCH_SHARE)
        self.starting: set[Handover] = set()
        """Handles of requests that have not begun, added by the caller's thread."""
        self._is_closing = False
        try:
            listen = parse_address(settings.listen)
            self.address = self.connections.server.listen_tcp(listen.host, listen.port)
        except BaseException:
            self.release()
            raise

    # --- calls of this rank's users ---

    def begin(self, handle: Handover, act: Callable[[], None]) -> None:
        """Begin a request by `act`, which calls `send` or `receive`. Raises what `act` raises; the handle is
        finished then unless the request began."""
        try:
            act()
        except BaseException as error:
            if handle not in self.handles():
                handle.finish(typed(error))
            raise

    def send(self, handle: SendHandle, blocks: NDArray[Any], tokens: int, to: RemoteExecutor | None, deadline_ns: int) -> None:
        """Start to send a request. Raises InvalidArgument, Closed, Cancelled."""
        self._arrived(handle)
        if (error := self.executor.failure_of(handle.request_id)) is not None:
            self._end(handle, error, deadline_ns)
        else:
            self.sender.begin(handle, blocks, tokens, to, deadline_ns)

    def receive(self, handle: ReceiveHandle, wanted: ReceiveRequest, token_ids: Any) -> None:
        """Start to receive a request, from the store first if `token_ids` are given. Raises as `send`."""
        self._arrived(handle)
        if (error := self.executor.failure_of(handle.request_id)) is not None:
            self._end(handle, error, wanted.deadline_ns)
            return
        self.executor.begun(handle.request_id, wanted.deadline_ns)
        if self._store is None or token_ids is None:
            self._ask(handle, wanted)
        else:
            self._fetch(handle, wanted, self._store, token_ids)

    def _arrived(self, handle: Handover) -> None:
        """Check that a request may begin. Raises InvalidArgument, Closed, Cancelled."""
        self.starting.discard(handle)
        if handle.is_abandoned:
            raise cancelled()
        if self._is_closing:
            raise Closed("the transceiver is closed")
        if any(handle.request_id in requests for requests in (self.sender, self.receiver, self.fetches)):
            raise InvalidArgument(f"request {handle.request_id!r} is under way already: use a new id for another attempt")

    def _fetch(self, handle: ReceiveHandle, wanted: ReceiveRequest, store: RankPrefixStore, token_ids: Any) -> None:
        layout, rank, first_token = self.resources.layout, self.resources.rank, wanted.first_token

        def fetch(deadline_s: float) -> int:
            return fetch_prefix(store, layout, rank, token_ids, wanted.blocks, first_token=first_token, deadline_s=deadline_s)

        def then(tokens: int, error: KVStoreError | None, is_fenced: bool) -> None:
            handle.store_tokens = tokens
            error = error or self.executor.failure_of(handle.request_id)
            if error is not None:
                self._end(handle, error, wanted.deadline_ns, is_fenced=is_fenced)
            else:
                self._ask(handle, wanted._replace(first_token=max(first_token, tokens)))

        self.fetches.begin(handle, fetch, then, deadline_ns=wanted.deadline_ns)

    def _ask(self, handle: ReceiveHandle, wanted: ReceiveRequest) -> None:
        try:
            self.receiver.begin(handle, wanted)
        except Exception as error:
            if not isinstance(error, KVStoreError):
                log.exception("a request could not begin")
            self._end(handle, typed(error), wanted.deadline_ns)

    def _end(self, handle: Handover, error: KVStoreError, deadline_ns: int, *, is_fenced: bool = True) -> None:
        """Finish a request that no side has."""
        handle.finish(error, is_fenced=is_fenced)
        self.executor.over(handle, deadline_ns)

    def fail(self, request_id: bytes, error: KVStoreError) -> None:
        """Fail a request: its caller cancelled it, or another rank of this executor failed it. Unknown requests are
        ignored."""
        is_here = self.sender.fail(request_id, error) or self.fetches.fail(request_id, error)
        if not is_here:
            self.receiver.fail(request_id, error)

    def handles(self) -> list[Handover]:
        """Return the handles of unfinished requests."""
        return [*self.sender.handles(), *self.receiver.handles(), *self.fetches.handles()]

    def expire(self) -> None:
        """Expire what timed out, and end abandoned requests."""
        now_ns = self.resources.reactor.now_ns()
        self.sender.expire(now_ns)
        self.executor.expire(now_ns)
        self.end_abandoned()

    def end_abandoned(self) -> None:
        """End requests whose caller was interrupted."""
        for handle in [*self.starting]:
            if handle.is_abandoned:
                self.starting.discard(handle)
                handle.finish(cancelled())
        for handle in self.handles():
            if handle.is_abandoned:
                self.fail(handle.request_id, cancelled())

    def end_all(self) -> None:
        """Fail every request with Closed and accept no more."""
        self._is_closing = True
        error = Closed("the transceiver is closed")
        for handle in self.handles():
            self.fail(handle.request_id, error)

    def release(self) -> None:
        """Close connections, threads and memory once no request is left. Waits for threads that still access the pool.

        Raises DeadlineExceeded: a peer keeps reading the pool.
        """
        self.fetches.close()
        self.connections.close()
        self.resources.worker.shutdown(wait=True)
        self.resources.staging.close()
        self.resources.close()

    # --- messages of other ranks ---

    def received(self, peer: RankInfo, message: Message, header: FrameHeader, answer: Answer) -> None:
        """Handle a message: see `MessageHandler`."""
        until_ns = self.resources.reactor.now_ns() + header.deadline_ms * 1_000_000
        if isinstance(message, PartReady):
            self.receiver.part(peer, message, answer)
            return
        if isinstance(message, RequestCache):
            if (error := self.executor.failure_of(message.request_id)) is not None:
                raise error
            self.sender.ask(peer, message, until_ns)
        elif isinstance(message, RankReport | RequestEnded):
            self.executor.received(peer, message, until_ns)
        elif isinstance(message, CancelRequest):
            self._stopped(peer, message)
        elif isinstance(message, ReadsDone):
            self.receiver.done(peer, message)
        else:
            assert isinstance(message, ExportRegions)
            self.receiver.show(peer, message)
        answer(None)

    def _stopped(self, peer: RankInfo, message: CancelRequest) -> None:
        if not message.code:
            raise ProtocolError("a message of a failed request has no error code")
        error = from_code(message.code, message.text)
        is_here = self.sender.fail(message.request_id, error, reported_by=peer) or self.receiver.fail(
            message.request_id, error, reported_by=peer
        )
        if not is_here:
            self.executor.remember(message.request_id, error)

    def lost(self, peer: RankInfo, error: KVStoreError) -> None:
        """Handle an unreachable rank: see `MessageHandler`."""
        self.sender.lost(peer, error)
        self.receiver.lost(peer, error)
        self.executor.lost(peer)
        self.resources.lost(peer)


def cancelled() -> Cancelled:
    return Cancelled("the request was cancelled")
