"""`CacheTransceiver`: one rank's endpoint for handing over KV cache, the interface for engines.

One reactor thread holds all state. Worker threads gather, scatter and submit transfers; the transfer engine has its own
threads.
"""

import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import INSTANCE_BYTES, RankInfo, RemoteExecutor, executor
from kvstore.handover.handles import Handover, ReceiveHandle, SendHandle
from kvstore.handover.prefix import RankPrefixStore
from kvstore.handover.ranks.completion_tracker import RequestOutcome
from kvstore.handover.receiving.side import ReceiveRequest
from kvstore.handover.requests import RankRequests, cancelled
from kvstore.handover.resources import RankSetup
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import Closed, DeadlineExceeded, Forked, InvalidArgument
from kvstore.protocol.handover_messages import MAX_REQUEST_ID_BYTES
from kvstore.rpc.address import host_id, parse_address
from kvstore.rpc.reactor import Reactor
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.memory.signal_safety import UninterruptibleEvent

MAX_DEADLINE_S: Final = 3600.0
"""Maximum that frames can carry."""
CALL_S: Final = 30.0
"""Timeout of a call to the reactor's thread, which never blocks: a longer call is a bug."""
EXPIRE_INTERVAL_S: Final = 0.25
END_POLL_S: Final = 0.005
"""Interval at which a closing transceiver checks whether every request is over."""


def check_request_id(request_id: bytes) -> None:
    """Raises InvalidArgument: not bytes, or of invalid length."""
    if not isinstance(request_id, bytes) or not 1 <= len(request_id) <= MAX_REQUEST_ID_BYTES:
        raise InvalidArgument(f"a request id is 1 to {MAX_REQUEST_ID_BYTES} bytes, not {request_id!r:.80}")


def block_indexes(blocks: ArrayLike, layout: CacheLayout, *, tokens: int) -> NDArray[np.int64]:
    """Return a copy of the block list. Raises InvalidArgument: too few blocks for the tokens, or outside the pool."""
    indexes = np.array(blocks, np.int64).reshape(-1)
    if tokens < 1 or len(indexes) * layout.spec.block_tokens < tokens:
        raise InvalidArgument(f"{len(indexes)} blocks of {layout.spec.block_tokens} tokens for a sequence of {tokens} tokens")
    if indexes.min() < 0 or indexes.max() >= layout.pool_blocks:
        raise InvalidArgument(f"a block index is 0 to {layout.pool_blocks - 1}, not {indexes.min()} or {indexes.max()}")
    return indexes


def check_deadline(deadline_s: float) -> None:
    """Raises InvalidArgument: out of range."""
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise InvalidArgument(f"a deadline is more than 0 and at most {MAX_DEADLINE_S:g} s away, not {deadline_s!r}")


def check_regions(layout: CacheLayout, rank: int, regions: Sequence[Region]) -> None:
    """Raises InvalidArgument: no such rank, or its pool does not consist of these regions."""
    sizes = [layout.region_bytes(rank, number) for number in range(layout.region_count(rank))]
    given = [region.size_bytes for region in regions]
    if len(given) != len(sizes) or any(size < least for size, least in zip(given, sizes, strict=True)):
        raise InvalidArgument(
            f"the pool of rank {rank} has {len(sizes)} regions, the first of {sizes[0]} bytes; given are {len(given)}: {given[:4]}"
        )


class CacheTransceiver:
    """One rank's endpoint of every hand-over. Thread-safe. A context manager that closes it. In a forked child calls
    raise Forked and `close` does nothing.

    1. Every rank of an executor calls `describe`. An executor that wants its cache receives all descriptions and calls
      `connect` with them.
    2. With more than one rank, each also calls `join` with its own executor's descriptions. Ranks then share failures
      and agree on which requests are complete.
    3. A request id names one attempt; another attempt uses a new id.
    """

    def __init__(
        self,
        layout: CacheLayout,
        rank: int,
        regions: Sequence[Region],
        engine: TransferEngine,
        settings: HandoverSettings | None = None,
        *,
        store: RankPrefixStore | None = None,
    ) -> None:
        """Start the transceiver.

        Args:
            layout: of the executor.
            rank: this rank's number in it.
            regions: the rank's pool, one region for each of the layout's (`CacheLayout.region_bytes`), in order. Local
                ranks can read regions from `engine.allocate` without a network. Owned by the caller, who keeps them
                until `close` has returned.
            engine: moves the bytes. Owned by the caller and used by one transceiver at a time, which disconnects
                unreachable ranks, and everything that it connected when it is closed.
            settings: see HandoverSettings.
            store: source of prefixes.

        Raises:
            InvalidArgument: no such rank, or the regions do not fit the layout.
            ConfigError: it cannot listen.
        """
        self.layout, self.rank = layout, rank
        self.settings = settings or HandoverSettings()
        check_regions(layout, rank, regions)
        self._instance = secrets.token_bytes(INSTANCE_BYTES)
        self._process_id = os.getpid()
        self._is_closing = self._is_closed = False
        self._closed = UninterruptibleEvent(math.inf)
        self._failure: BaseException | None = None
        self._reactor = Reactor()
        try:
            setup = RankSetup(layout, rank, tuple(regions), engine, self.settings, store)
            self._requests = RankRequests(setup, self._reactor, self._instance)
        except BaseException:
            self._reactor.close()
            raise
        self._address = self.settings.advertise or self._requests.address
        self._requests.connections.description = self.describe()
        self._reactor.every(EXPIRE_INTERVAL_S, self._expire_due)
        self._thread = threading.Thread(target=self._serve, name="kvstore-transceiver", daemon=True)
        self._thread.start()

    # --- executors ---

    def describe(self) -> bytes:
        """Return this rank's description, opaque bytes for other ranks. Keep it secret like a password: its holder
        can take the cache of any request whose id it knows."""
        resources = self._requests.resources
        info = RankInfo(
            instance=self._instance,
            rank=self.rank,
            control=parse_address(self._address),
            layout=self.layout,
            engine=resources.engine.describe(),
            host=host_id(),
            is_shared=all(region.fd >= 0 for region in resources.regions),
        )
        return info.pack()

    def connect(self, descriptions: Sequence[bytes]) -> RemoteExecutor:
        """Return another executor, by the descriptions of all its ranks. Does no I/O. Raises ProtocolError,
        InvalidArgument."""
        return executor(descriptions)

    def join(self, descriptions: Sequence[bytes]) -> None:
        """Set the ranks of this executor, including this one. Call it on each rank before its first request, unless
        there is only one rank.

        Raises:
            ProtocolError, InvalidArgument: as `connect`, or this rank or layout is not among them.
        """
        ranks = executor(descriptions).ranks
        if self.rank >= len(ranks) or ranks[self.rank].instance != self._instance:
            raise InvalidArgument(f"rank {self.rank} of these descriptions is not this one")
        self._call(lambda: self._requests.executor.join(ranks))

    # --- requests ---

    def send(
        self, request_id: bytes, blocks: ArrayLike, *, tokens: int, to: RemoteExecutor | None = None, deadline_s: float | None = None
    ) -> SendHandle:
        """Send a request's cache. Every rank of the executor (of its attention-DP group) calls it.

        Layers are sent once they are marked ready (`SendHandle.layer_ready`, `all_ready`). The blocks must not change
        until `SendHandle.wait` has returned or raised. Use `finished` to free them on all ranks at once.

        Args:
            request_id: id of this attempt in the serving system, 1 to 255 bytes.
            blocks: pool indices of the sequence's blocks, in order; with context parallelism block b's is in the pool
                of the ranks b % cp.
            tokens: tokens of the sequence; the rest of the last block is not sent.
            to: the receiving executor; None: the first that requests it.
            deadline_s: from now on; None: that of the settings.

        Raises:
            InvalidArgument: an argument is out of range, or the request is under way here already.
            Closed: the transceiver is closed.
        """
        check_request_id(request_id)
        indexes, deadline_ns = block_indexes(blocks, self.layout, tokens=tokens), self._deadline_ns(deadline_s)
        handle = SendHandle(request_id, limit_s=self._limit_s(deadline_ns))
        handle.on_cancel = lambda: self._reactor.call_soon(lambda: self._requests.fail(request_id, cancelled()))
        handle.on_ready = lambda layer: self._reactor.call_soon(lambda: self._requests.sender.layer_ready(request_id, layer))
        self._begin(handle, lambda: self._requests.send(handle, indexes, tokens, to, deadline_ns))
        return handle

    def receive(
        self,
        request_id: bytes,
        blocks: ArrayLike,
        *,
        tokens: int,
        source: RemoteExecutor,
        first_token: int = 0,
        source_dp: int = 0,
        token_ids: Any = None,
        deadline_s: float | None = None,
    ) -> ReceiveHandle:
        """Receive a request's cache into `blocks`. Every rank of the executor (of its attention-DP group) calls it. The
        source may begin later.

        The blocks are written until `ReceiveHandle.wait` has returned or raised.

        Args:
            request_id, blocks, tokens, deadline_s: as `send`, of this executor's pools.
            source: the executor that has the request; `source_dp`: its attention-DP group.
            first_token: earlier tokens are present and are not written; a multiple of the block size with quantised
                blocks.
            token_ids: of the sequence. With them, tokens from `first_token` on are fetched from the transceiver's store
                first, if a block begins there, and the source sends only the rest.

        Raises:
            InvalidArgument: an argument is out of range, or the request is under way here already.
            Closed: the transceiver is closed.
        """
        check_request_id(request_id)
        indexes, deadline_ns = block_indexes(blocks, self.layout, tokens=tokens), self._deadline_ns(deadline_s)
        if not 0 <= first_token <= tokens:
            raise InvalidArgument(f"first_token is {first_token}: it must be 0 to {tokens}, the tokens of the sequence")
        handle = ReceiveHandle(request_id, limit_s=self._limit_s(deadline_ns))
        handle.on_cancel = lambda: self._reactor.call_soon(lambda: self._requests.fail(request_id, cancelled()))
        wanted = ReceiveRequest(indexes, tokens, first_token, source, source_dp, deadline_ns)
        sequence = None if token_ids is None else token_ids[:tokens]
        self._begin(handle, lambda: self._requests.receive(handle, wanted, sequence))
        return handle

    def _begin(self, handle: Handover, begin: Callable[[], None]) -> None:
        """Begin a request. Raises what `begin` raises, and what a signal handler raises meanwhile; the request is
        over then."""
        self._check_process()
        try:
            self._requests.starting.add(handle)
            self._call(lambda: self._requests.begin(handle, begin))
        except BaseException:
            handle.is_abandoned = True
            if not self._is_closed:  # else it never begins
                try:
                    self._reactor.call_soon(self._requests.end_abandoned)
                finally:
                    handle.wait_uninterruptibly()
            raise

    def finished(self) -> list[RequestOutcome]:
        """Return requests that completed on all ranks of the executor (of the attention-DP group) since the last call,
        each with its error or None.

        A request that failed on any rank is returned once it is over on this one. A rank that did not join others
        returns its own.
        """
        if self._is_closed:
            raise Closed("the transceiver is closed")
        return self._requests.executor.take_finished()

    @property
    def staging_bytes(self) -> int:
        """Staging memory in use."""
        return self._requests.resources.staging.taken_bytes

    @property
    def early_request_count(self) -> int:
        """Receivers' requests that wait for `send`."""
        return self._requests.sender.early_request_count

    # --- the end ---

    def close(self) -> None:
        """Fail every request with Closed, and release connections, threads and memory. A second close is a no-op.

        Exceptions of signal handlers are raised after it is closed. Raises DeadlineExceeded: a peer keeps reading the
        pool, whose regions must stay.
        """
        if os.getpid() != self._process_id:  # the reactor's thread is the parent's
            return
        try:
            self._is_closing = True
            self._reactor.call_soon(self._end)
            self._closed.wait()
            self._thread.join()
        except BaseException:
            self._closed.wait_uninterruptibly()
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _serve(self) -> None:
        """Body of the reactor's thread. It also releases resources, so that no signal handler can interrupt that."""
        try:
            self._reactor.run()
            self._is_closed = True
            self._reactor.run_once(0.0)  # calls handed over before that
            self._requests.release()
        except BaseException as error:
            self._failure = error
        finally:
            self._reactor.close()
            self._closed.set()

    def _end(self) -> None:
        """Stop the reactor once every request is over."""
        self._requests.end_all()
        if self._requests.handles():
            self._reactor.call_later(END_POLL_S, self._end)
        else:
            self._reactor.stop()

    def _expire_due(self) -> None:
        self._requests.expire()
        if self._is_closing:
            self._end()

    def __enter__(self) -> "CacheTransceiver":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- helpers ---

    def _check_process(self) -> None:
        """Raises Forked: the reactor's thread is the parent's."""
        if os.getpid() != self._process_id:
            raise Forked(f"this transceiver is that of process {self._process_id}, which process {os.getpid()} was forked from")

    def _deadline_ns(self, deadline_s: float | None) -> int:
        """Return the deadline. Raises InvalidArgument."""
        left_s = self.settings.deadline_s if deadline_s is None else deadline_s
        check_deadline(left_s)
        return self._reactor.now_ns() + int(left_s * 1e9)

    def _limit_s(self, deadline_ns: int) -> float:
        return (deadline_ns - self._reactor.now_ns()) / 1e9 + self.settings.fence_timeout_s

    def _call(self, function: Callable[[], None]) -> None:
        """Run `function` in the reactor's thread. Raises what it raises, Closed and Forked; DeadlineExceeded: that
        thread hangs."""
        self._check_process()
        answered, raised = UninterruptibleEvent(CALL_S), list[BaseException]()

        def run() -> None:
            try:
                function()
            except BaseException as error:
                raised.append(error)
            finally:
                answered.set()

        if self._is_closed:
            raise Closed("the transceiver is closed")
        self._reactor.call_soon(run)
        if not answered.wait(CALL_S):
            raise DeadlineExceeded(f"the transceiver's thread did not answer within {CALL_S:g} s")
        if raised:
            raise raised[0]
