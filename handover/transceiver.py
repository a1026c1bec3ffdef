"""One rank of an executor that hands KV cache over: `CacheTransceiver`, what engines call. The sides do the work; this joins them.

One reactor thread holds all state. Worker threads gather, scatter and begin transfers; the transfer engine has threads of its own.
"""

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from numpy.typing import ArrayLike

from kvstore.handover.arguments import block_indexes, check_deadline, check_regions, check_request_id
from kvstore.handover.config import HandoverSettings
from kvstore.handover.core import Core
from kvstore.handover.description import INSTANCE_BYTES, Counterpart, RankInfo, executor
from kvstore.handover.executor import Executor
from kvstore.handover.fetching import Fetches
from kvstore.handover.handles import PATIENCE_S, Handover, Receiving, Sending
from kvstore.handover.links import Answer, Links
from kvstore.handover.prefix import PrefixStore, fetch_prefix
from kvstore.handover.receiver_side import ReceiverSide, Wanted
from kvstore.handover.roll_call import Outcome
from kvstore.handover.sender_side import SenderSide
from kvstore.handover.staging import Staging
from kvstore.handover.streams import StreamListener
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import Cancelled, Closed, InvalidArgument, KVStoreError, ProtocolError, from_code
from kvstore.protocol.frames import Header
from kvstore.protocol.handover_messages import Ask, Done, Part, Report, Show, Stop, Verdict
from kvstore.protocol.message import Message
from kvstore.rpc.address import host_id, parse_address
from kvstore.rpc.reactor import Reactor
from kvstore.transfer.agent import Rail
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.streams.connection import Connection

CALL_S: Final = 30.0
"""For a call to the reactor's thread, which never blocks: one that takes longer is at fault."""
SWEEP_S: Final = 0.25


class CacheTransceiver:
    """One rank's end of every hand-over. Thread-safe. A context manager that closes it.

    All ranks of an executor `describe` themselves; who wants their cache carries the descriptions over and `connect`s to all of them at
    once. With more than one rank, each is also told its own executor's descriptions (`join`), so that ranks learn of one another's failures
    and agree on what is over. A request id names one attempt: another attempt takes another one.
    """

    def __init__(
        self,
        layout: CacheLayout,
        rank: int,
        regions: Sequence[Region],
        engine: TransferEngine | None,
        settings: HandoverSettings | None = None,
        *,
        store: PrefixStore | None = None,
        connection: type[Connection] | None = None,
        rail: Rail | None = None,
    ) -> None:
        """
        Args:
            layout: of the executor.
            rank: this one's number in it.
            regions: the rank's pool, one region for each that the layout has (`CacheLayout.region_bytes`), in order. Those from
                `engine.allocate` can be read by ranks of the same host without a network. They stay the caller's, who keeps them until
                `close` has returned.
            engine: for one-sided transfers; None: everything goes by `connection`. It stays the caller's.
            settings: see HandoverSettings.
            store: where the beginning of sequences may be found.
            connection: a transport that sends and receives, on `rail`, for ranks that have no engine or none in common.

        Raises:
            InvalidArgument: there is no such rank, or the regions are not those of the layout. ConfigError: it cannot listen.
        """
        self.layout, self.rank = layout, rank
        self.settings = settings or HandoverSettings()
        check_regions(layout, rank, regions)
        self._instance = secrets.token_bytes(INSTANCE_BYTES)
        self._reactor = Reactor()
        self._staging = Staging(self.settings.staging_bytes)
        self._worker = ThreadPoolExecutor(self.settings.copy_threads, thread_name_prefix="kvstore-handover")
        self._links = Links(self._reactor, self.settings, self._instance, self)
        self._executor = Executor(layout.parallel, rank, self._reactor, self._links, self._fail_here)
        self._streams: StreamListener | None = None
        self._store = store
        self._fetches = Fetches(self._reactor, self.settings.fence_timeout_s)
        self._closing = threading.Lock()
        self._is_closing = self._is_closed = False
        try:
            if connection is not None:
                self._streams = StreamListener(connection.listen(rail or Rail()))
            listen = parse_address(self.settings.listen)
            address = self._links.server.listen_tcp(listen.host, listen.port)
        except BaseException:
            self._release()
            raise
        core = Core(
            layout=layout,
            rank=rank,
            regions=tuple(regions),
            engine=engine,
            settings=self.settings,
            reactor=self._reactor,
            worker=self._worker,
            staging=self._staging,
            links=self._links,
            streams=self._streams,
            connection=connection,
            rail=rail or Rail(),
            begun=self._executor.begun,
            over=self._executor.over,
        )
        self._core = core
        self._sender, self._receiver = SenderSide(core), ReceiverSide(core)
        self._address = self.settings.advertise or address
        self._links.description = self.describe()
        self._reactor.every(SWEEP_S, self._sweep)
        self._thread = threading.Thread(target=self._reactor.run, name="kvstore-transceiver", daemon=True)
        self._thread.start()

    # --- who is who ---

    def describe(self) -> bytes:
        """How other ranks reach this one: opaque, to be carried by any means. Whoever has it may take the cache of a request whose id it
        knows: pass it on as you would a password."""
        core = self._core
        info = RankInfo(
            instance=self._instance,
            rank=self.rank,
            control=parse_address(self._address),
            layout=self.layout,
            engine=core.engine.describe() if core.engine is not None else b"",
            listener=self._streams.metadata() if self._streams is not None else b"",
            host=host_id(),
            is_shared=all(region.fd >= 0 for region in core.regions),
        )
        return info.pack()

    def connect(self, descriptions: Sequence[bytes]) -> Counterpart:
        """Another executor, by the descriptions of all its ranks. Does no I/O. Raises ProtocolError, InvalidArgument."""
        return executor(descriptions)

    def join(self, descriptions: Sequence[bytes]) -> None:
        """The ranks of this executor, this one among them. To be called on each before its first request, unless there is one rank only.

        Raises:
            ProtocolError, InvalidArgument: as `connect`, or this rank or layout is not among them.
        """
        ranks = executor(descriptions).ranks
        if self.rank >= len(ranks) or ranks[self.rank].instance != self._instance:
            raise InvalidArgument(f"rank {self.rank} of these descriptions is not this one")
        self._call(lambda: self._executor.join(ranks))

    # --- requests ---

    def send(
        self, request_id: bytes, blocks: ArrayLike, *, tokens: int, to: Counterpart | None = None, deadline_s: float | None = None
    ) -> Sending:
        """Give away the cache of a request. Every rank of the executor (of its attention-DP group) calls it.

        Layers go when they are said to be ready (`Sending.layer_ready`, `all_ready`). The blocks stay as they are until `Sending.wait` has
        returned or raised; freeing them on all ranks at once is what `finished` is for.

        Args:
            request_id: the serving system's, 1 to 255 bytes, of this attempt.
            blocks: indexes in the pools of the sequence's blocks, in order; with context parallelism block b's is that in the pool of the
                ranks b % cp.
            tokens: of the sequence; what lies behind them in the last block is not sent.
            to: who is to have it; None: the first that asks.
            deadline_s: from now on; None: that of the settings.

        Raises:
            InvalidArgument: an argument is out of range, or the request is under way here already. Closed.
        """
        check_request_id(request_id)
        indexes, deadline_ns = block_indexes(blocks, self.layout, tokens=tokens), self._deadline_ns(deadline_s)
        handle = Sending(request_id, limit_s=self._limit_s(deadline_ns))
        handle.on_cancel = lambda: self._reactor.call_soon(lambda: self._fail_here(request_id, _cancelled()))
        handle.on_ready = lambda layer: self._reactor.call_soon(lambda: self._sender.layer_ready(request_id, layer))

        def begin() -> None:
            self._check_new(request_id)
            if (error := self._executor.failure_of(request_id)) is not None:
                self._end(handle, error, deadline_ns)
            else:
                self._sender.begin(handle, indexes, tokens, to, deadline_ns)

        self._call(begin)
        return handle

    def receive(
        self,
        request_id: bytes,
        blocks: ArrayLike,
        *,
        tokens: int,
        source: Counterpart,
        first_token: int = 0,
        source_dp: int = 0,
        token_ids: Any = None,
        deadline_s: float | None = None,
    ) -> Receiving:
        """Take the cache of a request into `blocks`. Every rank of the executor (of its attention-DP group) calls it. The request need not
        be at the source yet.

        The blocks are written until `Receiving.wait` has returned or raised.

        Args:
            request_id, blocks, tokens, deadline_s: as `send`, of this executor's pools.
            source: the executor that has it, and `source_dp` its attention-DP group.
            first_token: what comes before is here already, and is not written; a multiple of the block size with quantised blocks.
            token_ids: of the sequence; with them what follows `first_token` is fetched from the transceiver's store first, if that is where
                a block begins, and asked of the source is only what the store does not have.

        Raises:
            InvalidArgument: an argument is out of range, or the request is under way here already. Closed.
        """
        check_request_id(request_id)
        indexes, deadline_ns = block_indexes(blocks, self.layout, tokens=tokens), self._deadline_ns(deadline_s)
        if not 0 <= first_token <= tokens:
            raise InvalidArgument(f"first_token is {first_token}: it must be 0 to {tokens}, the tokens of the sequence")
        handle = Receiving(request_id, limit_s=self._limit_s(deadline_ns))
        handle.on_cancel = lambda: self._reactor.call_soon(lambda: self._fail_here(request_id, _cancelled()))
        wanted = Wanted(indexes, tokens, first_token, source, source_dp, deadline_ns)
        self._call(lambda: self._begin_receiving(handle, wanted, None if token_ids is None else token_ids[:tokens]))
        return handle

    def _begin_receiving(self, handle: Receiving, wanted: Wanted, token_ids: Any) -> None:
        self._check_new(handle.request_id)
        if (error := self._executor.failure_of(handle.request_id)) is not None:
            self._end(handle, error, wanted.deadline_ns)
            return
        self._executor.begun(handle.request_id, wanted.deadline_ns)
        if self._store is None or token_ids is None:
            self._ask(handle, wanted)
        else:
            self._fetch(handle, wanted, self._store, token_ids)

    def _fetch(self, handle: Receiving, wanted: Wanted, store: PrefixStore, token_ids: Any) -> None:
        def fetch(deadline_s: float) -> int:
            first_token = wanted.first_token
            return fetch_prefix(store, self.layout, self.rank, token_ids, wanted.blocks, first_token=first_token, deadline_s=deadline_s)

        def then(tokens: int, error: KVStoreError | None, is_fenced: bool) -> None:
            handle.store_tokens = tokens
            error = error or self._executor.failure_of(handle.request_id)
            if error is not None:
                self._end(handle, error, wanted.deadline_ns, is_fenced=is_fenced)
            else:
                self._ask(handle, wanted._replace(first_token=max(wanted.first_token, tokens)))

        self._fetches.begin(handle, fetch, then, deadline_ns=wanted.deadline_ns)

    def _ask(self, handle: Receiving, wanted: Wanted) -> None:
        try:
            self._receiver.begin(handle, wanted)
        except KVStoreError as error:
            self._end(handle, error, wanted.deadline_ns)

    def finished(self) -> list[Outcome]:
        """Requests that are over on all ranks of the executor (of the attention-DP group) since the last call, each with its error or None.

        One that has failed on any rank is told once it is over on this one. Of a rank that has not joined others: those over here.
        """
        finished: list[Outcome] = self._call(self._executor.take_finished)
        return finished

    @property
    def staging_bytes(self) -> int:
        """Staging memory that requests use now."""
        return self._staging.taken_bytes

    @property
    def early_count(self) -> int:
        """Asks of receiver ranks for requests that are not here yet."""
        return self._sender.early_count

    # --- the end ---

    def close(self) -> None:
        """End every request with Closed, and let go of connections, threads and memory. A second close is a no-op."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closing = True
            handles = self._call(self._end_all)
            self._fetches.close()  # they write into the pool
            for handle in handles:
                handle.wait_over(self.settings.fence_timeout_s + PATIENCE_S)
            self._is_closed = True
            self._reactor.stop()
            self._thread.join()
            self._release()
            self._core.close()

    def _end_all(self) -> list[Handover]:
        """Every request ends, with Closed; those that have not yet."""
        handles = [*self._sender.handles(), *self._receiver.handles(), *self._fetches.handles()]
        error = Closed("the transceiver is closed")
        for handle in handles:
            self._fail_here(handle.request_id, error)
        return handles

    def _release(self) -> None:
        self._links.close()
        if self._streams is not None:
            self._streams.close()
        self._worker.shutdown(wait=True)
        self._fetches.close()
        self._staging.close()
        self._reactor.close()

    def __enter__(self) -> "CacheTransceiver":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- what comes from other ranks, in the reactor's thread ---

    def received(self, peer: RankInfo, message: Message, header: Header, answer: Answer) -> None:
        """For Links."""
        until_ns = self._reactor.now_ns() + header.deadline_ms * 1_000_000
        if isinstance(message, Ask):
            if (error := self._executor.failure_of(message.request_id)) is not None:
                raise error
            self._sender.ask(peer, message, until_ns)
            answer(None)
        elif isinstance(message, Part):
            self._receiver.part(peer, message, answer)
        elif isinstance(message, Report | Verdict):
            self._executor.received(peer, message, until_ns)
            answer(None)
        elif isinstance(message, Stop):
            self._stopped(peer, message)
            answer(None)
        elif isinstance(message, Done):
            self._receiver.done(peer, message)
            answer(None)
        else:
            assert isinstance(message, Show)
            self._receiver.show(peer, message)
            answer(None)

    def _stopped(self, peer: RankInfo, message: Stop) -> None:
        if not message.code:
            raise ProtocolError("a request that has failed has an error")
        error = from_code(message.code, message.text)
        is_here = self._sender.fail(message.request_id, error, told_by=peer) or self._receiver.fail(message.request_id, error, told_by=peer)
        if not is_here:
            self._executor.remember(message.request_id, error)

    def lost(self, peer: RankInfo, error: KVStoreError) -> None:
        """For Links."""
        self._sender.lost(peer, error)
        self._receiver.lost(peer, error)
        self._executor.lost(peer)

    def _fail_here(self, request_id: bytes, error: KVStoreError) -> None:
        """The caller cancels it, or another rank of this executor has failed it."""
        is_here = self._sender.fail(request_id, error) or self._fetches.fail(request_id, error)
        if not is_here:
            self._receiver.fail(request_id, error)

    def _sweep(self) -> None:
        now_ns = self._reactor.now_ns()
        self._sender.sweep(now_ns)
        self._executor.sweep(now_ns)

    # --- helpers ---

    def _end(self, handle: Handover, error: KVStoreError, deadline_ns: int, *, is_fenced: bool = True) -> None:
        """It is over before a side had it."""
        handle.finish(error, is_fenced=is_fenced)
        self._executor.over(handle, deadline_ns)

    def _check_new(self, request_id: bytes) -> None:
        if self._is_closing:
            raise Closed("the transceiver is closed")
        if request_id in self._sender or request_id in self._receiver or request_id in self._fetches:
            raise InvalidArgument(f"request {request_id!r} is under way already: another attempt takes another id")

    def _deadline_ns(self, deadline_s: float | None) -> int:
        """Raises InvalidArgument."""
        left_s = self.settings.deadline_s if deadline_s is None else deadline_s
        check_deadline(left_s)
        return self._reactor.now_ns() + int(left_s * 1e9)

    def _limit_s(self, deadline_ns: int) -> float:
        return (deadline_ns - self._reactor.now_ns()) / 1e9 + self.settings.fence_timeout_s

    def _call(self, function: Any) -> Any:
        if self._is_closed:
            raise Closed("the transceiver is closed")
        return self._reactor.call(function, deadline_s=CALL_S)


def _cancelled() -> Cancelled:
    return Cancelled("the request was cancelled")
