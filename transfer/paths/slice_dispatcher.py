"""Dispatcher of slices: assigns queued slices to paths, and handles their success or failure.

Holds the engine's state and its one lock, and has no threads. Agents' threads call it when a request is over; waiting
callers copy themselves where that is faster.
"""

import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from kvstore.protocol.errors import Cancelled, Closed, DeadlineExceeded, Denied, Fenced, InvalidArgument, KVStoreError, Unreachable
from kvstore.transfer.agent import AgentRequest, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.pieces import by_rail
from kvstore.transfer.paths.peer import Peer, Slice
from kvstore.transfer.paths.transfers import Transfer

DeferredCalls = list[Callable[[], None]]
"""Calls to make after the lock is released: agents and callers may call back."""
log = logging.getLogger("kvstore.transfer")


@dataclass(slots=True)
class RailCount:
    """Counters of a transport on one local rail. `failed_slices` were begun here and retried elsewhere or given up;
    `rests` counts cooldowns of its paths.
    """

    delivered_bytes: int = 0
    delivered_slices: int = 0
    failed_slices: int = 0
    rests: int = 0


class _Thread(threading.local):
    """Per thread: peers to dispatch before `dispatch` returns; None outside it."""

    peers: dict[Peer, None] | None = None


class SliceDispatcher:
    """Dispatches slices of all peers. Thread-safe. `lock` guards every peer, slice and transfer."""

    def __init__(self, settings: TransferSettings, clock_ns: Callable[[], int]) -> None:
        self.lock = threading.Lock()
        self.is_closed = False
        self.rails: defaultdict[tuple[str, str], RailCount] = defaultdict(RailCount)
        """By transport and local rail."""
        self._settings = settings
        self._clock_ns = clock_ns
        self._thread = _Thread()

    def begin(self, parts: Mapping[Peer, Sequence[Slice]], caller: Transfer | None = None) -> None:
        """Queue the slices of a transfer and dispatch as many as possible. Raises Closed or Unreachable; none is queued
        then.
        """
        with self.lock:
            if self.is_closed:
                raise Closed("the engine is closed")
            for peer in parts:
                if not peer.is_connected:
                    raise Unreachable(f"{peer.name} was disconnected")
            for peer, slices in parts.items():
                peer.push(slices)
        for peer in parts:
            self.dispatch(peer, caller)
            caller = None

    def end(self, peer: Peer, error: KVStoreError) -> None:
        """Disconnect a peer: its queued slices fail."""
        deferred: DeferredCalls = []
        with self.lock:
            for part in peer.close():
                self._fail(part.transfer, error, deferred)
        _run(deferred)

    def dispatch(self, peer: Peer, caller: Transfer | None = None) -> None:
        """Begin as many slices as the peer's paths accept. The first of the `caller`'s is left for its own thread to
        run, in `wait`.

        Agents may finish a request before `submit` returns, which re-enters this method. Re-entries are recorded and
        processed by the outer call, so that they do not nest without bound.
        """
        if self._thread.peers is not None:
            self._thread.peers[peer] = None
            return
        waiting = self._thread.peers = {peer: None}
        try:
            while waiting:
                self._dispatch_once(waiting.popitem()[0], caller)
                caller = None
        finally:
            self._thread.peers = None

    def _dispatch_once(self, peer: Peer, caller: Transfer | None) -> None:
        begun: list[tuple[TransferAgent, AgentRequest]] = []
        deferred: DeferredCalls = []
        with self.lock:
            while (next_one := self._next(peer, deferred)) is not None:
                begun.append(next_one)
        if caller is not None and begun:
            begun[0][1].caller_runs = begun[0][1].context.transfer is caller
        for agent, request in begun:
            _submit(agent, request)
        if begun:
            with self.lock:
                for agent, request in begun:
                    self._submitted(agent, request, deferred)
        _run(deferred)

    def _submitted(self, agent: TransferAgent, request: AgentRequest, deferred: DeferredCalls) -> None:
        """Make a submitted request cancellable, and cancel it if its transfer failed meanwhile. Called with the lock
        held.
        """
        transfer: Transfer = request.context.transfer
        if request in transfer.in_flight:
            transfer.in_flight[request] = agent
            if transfer.error is not None:
                deferred.append(functools.partial(agent.cancel, request))

    def _next(self, peer: Peer, deferred: DeferredCalls) -> tuple[TransferAgent, AgentRequest] | None:
        """Return the next slice that a path accepts, as its agent's request. Called with the lock held."""
        now_ns = self._clock_ns()
        while (part := peer.head()) is not None:
            if part.transfer.deadline.at_ns <= time.monotonic_ns():
                self._fail(part.transfer, part.transfer.deadline.exceeded(), deferred)
                continue
            path = peer.choose(part, now_ns)
            if path is None:
                self._fail(part.transfer, part.error or Unreachable(f"no transport of {peer.name} reaches this region"), deferred)
                continue
            agent, remote, _ = peer.routes[path]
            if peer.chooser.states[path].in_flight_slices >= agent.window:
                return None
            peer.pop()
            peer.chooser.begun(path, part.size_bytes, now_ns, is_retry=bool(part.tried))
            part.path, part.begun_ns = path, now_ns
            peer.used_ns = now_ns
            pieces = by_rail(part.pieces, path.transport, path.remote_rail)
            transfer = part.transfer
            request = AgentRequest(
                part.direction,
                remote,
                pieces,
                transfer.deadline,
                self._finished,
                context=part,
                waits_for=transfer,
                fences=part.fences,
                size_bytes=part.size_bytes,
            )
            transfer.in_flight[request] = None
            return agent, request
        return None

    def _finished(self, request: AgentRequest) -> None:
        """Callback of an agent's request that is over."""
        part: Slice = request.context
        deferred: DeferredCalls = []
        with self.lock:
            self._record_outcome(part, request, deferred)
        _run(deferred)
        self.dispatch(part.peer)

    def _record_outcome(self, part: Slice, request: AgentRequest, deferred: DeferredCalls) -> None:
        """Record the result of a slice: retry it, fail its transfer, or complete it. Called with the lock held."""
        transfer, chooser, path, error = part.transfer, part.peer.chooser, part.path, request.error
        assert path is not None
        now_ns, rail = self._clock_ns(), self.rails[path.transport, path.local_rail]
        had_failed = transfer.error is not None
        del transfer.in_flight[request]
        if error is None:
            chooser.succeeded(path, part.size_bytes, part.begun_ns, now_ns)
            rail.delivered_bytes += part.size_bytes
            rail.delivered_slices += 1
            transfer.slices_left -= 1
        elif isinstance(error, (Denied, Fenced, InvalidArgument, DeadlineExceeded, Cancelled)) or had_failed:
            chooser.cancelled(path, part.size_bytes)  # not the path's fault
            self._fail(transfer, error, deferred)
        else:
            rail.failed_slices += 1
            rail.rests += chooser.failed(path, part.size_bytes, now_ns)
            transfer.retries += 1
            part.tried += (path,)
            part.fences = (*request.fences, *request.unsettled)  # its agent may have begun more than one attempt
            part.error = error
            if part.peer.is_connected:
                part.peer.push_first(part)
            else:
                self._fail(transfer, error, deferred)
        if not transfer.in_flight and (had_failed or not transfer.slices_left):
            deferred.append(transfer.complete)

    def _fail(self, transfer: Transfer, error: KVStoreError, deferred: DeferredCalls) -> None:
        """Fail the transfer: drop its queued slices and cancel those in flight. Called with the lock held."""
        if transfer.error is not None or not (transfer.slices_left or transfer.in_flight):
            return
        transfer.error = copy(error)  # without its traceback, see Transfer.check: it may have been raised in the waiting thread
        if transfer.in_flight:
            submitted = [(request, agent) for request, agent in transfer.in_flight.items() if agent is not None]
            deferred.extend(functools.partial(agent.cancel, request) for request, agent in submitted)
        else:
            deferred.append(transfer.complete)

    def abort(self, transfer: Transfer, error: KVStoreError) -> None:
        """End a transfer with this error. Called by Transfer."""
        deferred: DeferredCalls = []
        with self.lock:
            self._fail(transfer, error, deferred)
        _run(deferred)

    def assist(self, transfer: Transfer) -> None:
        """Run requests of the transfer in its waiting thread. Called by Transfer."""
        with self.lock:
            requests = list(transfer.in_flight.items())
        for request, agent in requests:
            if agent is not None and not transfer.is_over:
                agent.run(request)


def _submit(agent: TransferAgent, request: AgentRequest) -> None:
    try:
        agent.submit(request)
    except Exception as error:  # a faulty plug-in must not fail other slices
        log.exception("the agent of %s failed to submit a request", agent.transport)
        if not request.is_over:
            request.finish(Unreachable(f"{agent.transport} failed: {error!r}"))


def _run(deferred: DeferredCalls) -> None:
    for action in deferred:
        action()
