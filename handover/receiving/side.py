"""Receiving side of a rank: its requests and their parts. Carries out what CacheReceiver decides.

The reactor's thread makes all calls; part_receiver.py documents what runs elsewhere.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.handover.description import RankInfo, RemoteExecutor
from kvstore.handover.handles import ReceiveHandle
from kvstore.handover.movements.movement import LayerWindow, MovementEnd
from kvstore.handover.movements.parts import PartId, PartPlan, RequestState
from kvstore.handover.ranks.rank_connections import Answer
from kvstore.handover.receiving.part_receiver import PartReceiver, choose_way
from kvstore.handover.receiving.request import CacheReceiver
from kvstore.handover.resources import REASON_GRACE_S, plan_of, remapping_of
from kvstore.handover.side import HandoverSide, SideRequest
from kvstore.kvcache.layouts.formatter import Remapping
from kvstore.protocol.errors import Closed, DeadlineExceeded, KVStoreError, ProtocolError, StaleHandle, Unreachable, typed
from kvstore.protocol.handover_messages import PUSH, ExportRegions, PartReady, ReadsDone, RequestCache

log = logging.getLogger("kvstore.handover")

NOTHING: Final = PartPlan(range(0), (), 1, 0)
"""Plan of a sender rank without receivers: another one has the same heads."""


class ReceiveRequest(NamedTuple):
    """Arguments of a caller's `receive`."""

    blocks: NDArray[np.int64]
    tokens: int
    first_token: int
    source: RemoteExecutor
    source_dp: int
    deadline_ns: int


@dataclass(slots=True, eq=False)
class _ReceivingRequest(SideRequest):
    handle: ReceiveHandle
    machine: CacheReceiver
    wanted: ReceiveRequest = field(kw_only=True)
    receivers: dict[int, PartReceiver] = field(kw_only=True)

    @property
    def movers(self) -> Collection[PartReceiver]:
        return self.receivers.values()


class ReceiverSide(HandoverSide[_ReceivingRequest]):
    """Requests that this rank receives."""

    # --- events ---

    def begin(self, handle: ReceiveHandle, wanted: ReceiveRequest) -> None:
        """Start to receive a request. Raises InvalidArgument, and as `choose_way`; nothing has begun then. Later
        failures, also unexpected ones, end the request through its handle."""
        resources = self._resources
        receivers = self._receivers(wanted)
        confirming = [rank for rank, receiver in receivers.items() if receiver.is_reading]
        machine = CacheReceiver({rank: receiver.plan for rank, receiver in receivers.items()}, confirming=confirming)
        ending = MovementEnd(resources.reactor, resources.settings.fence_timeout_s, lambda is_fenced: self._finish(request, is_fenced))
        request = _ReceivingRequest(handle, machine, ending, wanted.deadline_ns, wanted=wanted, receivers=receivers)
        self._requests[handle.request_id] = request
        ending.expire_at(wanted.deadline_ns, lambda: self._expire(request))
        try:
            self._open(request)
            for rank, receiver in receivers.items():
                if machine.error is not None:  # the previous sender failed at once
                    break
                request.asked[rank] = receiver.info
                self._ask(request, receiver)
        except Exception as error:
            if not isinstance(error, KVStoreError):
                log.exception("a request could not begin")
            self._fail(request, typed(error))
            return
        self._settle(request)

    def _receivers(self, wanted: ReceiveRequest) -> dict[int, PartReceiver]:
        """Return a receiver for each sender rank with parts, and for those that this rank notifies that they have
        none."""
        resources, source = self._resources, wanted.source
        remapping = remapping_of(source.layout, resources.layout, source_dp=wanted.source_dp, destination_dp=resources.dp)
        receivers = {}
        for rank in remapping.senders_of(resources.rank):
            way = choose_way(resources, source.ranks[rank], remapping)
            extent = {"first_token": wanted.first_token, "tokens": wanted.tokens, "part_bytes": way.part_bytes}
            plan = plan_of(remapping, rank, resources.rank, **extent)
            receivers[rank] = PartReceiver(
                resources, source.ranks[rank], way, remapping, plan, wanted.blocks, deadline_ns=wanted.deadline_ns
            )
        for rank in self._idle_senders(remapping, wanted.source_dp):
            receivers[rank] = PartReceiver(
                resources, source.ranks[rank], None, remapping, NOTHING, wanted.blocks, deadline_ns=wanted.deadline_ns
            )
        return receivers

    def _idle_senders(self, remapping: Remapping, source_dp: int) -> list[int]:
        """Return the sender ranks without receivers, if this rank is the one that notifies them."""
        resources, parallel = self._resources, remapping.source.parallel
        group = [rank for rank in range(resources.layout.parallel.ranks) if resources.layout.parallel.group_of(rank) == resources.dp]
        if resources.rank != group[0]:
            return []
        return [rank for rank in range(parallel.ranks) if parallel.group_of(rank) == source_dp and not remapping.receivers_of(rank)]

    def _open(self, request: _ReceivingRequest) -> None:
        resources = self._resources
        for receiver in request.receivers.values():
            receiver.open()
            if receiver.is_pool_written and request.window is None:
                request.window = LayerWindow(resources.engine, resources.regions, writable=True)

    def _ask(self, request: _ReceivingRequest, receiver: PartReceiver) -> None:
        wanted = request.wanted
        ask = RequestCache(request.handle.request_id, wanted.tokens, wanted.first_token, [], PUSH, [], dp=wanted.source_dp)

        def on_answer(error: KVStoreError | None) -> None:
            if error is not None:
                self._fail(request, error, reported_by=receiver.info)
            else:
                request.machine.answered(receiver.info.rank)
                self._settle(request)

        deadline_s = self._resources.left_s(wanted.deadline_ns)
        self._resources.connections.send_request(
            receiver.info, receiver.complete(ask, request.window), deadline_s=deadline_s, on_answer=on_answer
        )

    def show(self, info: RankInfo, message: ExportRegions) -> None:
        """A sender exported regions to read. Raises ProtocolError, StaleHandle."""
        self._find(info, message.request_id)[1].shown(message)

    def done(self, info: RankInfo, message: ReadsDone) -> None:
        """A sender confirmed the data that was read. Raises ProtocolError, StaleHandle."""
        request, _ = self._find(info, message.request_id)
        request.machine.confirmed(info.rank)
        self._settle(request)

    def part(self, info: RankInfo, message: PartReady, answer: Answer) -> None:
        """A sender offers a part. Raises the error for the sender; a protocol error of the sender ends the request."""
        request, receiver = self._find(info, message.request_id)
        part = PartId(message.layer_start, message.layer_end, message.chunk)
        slots = self._resources.settings.staging_slots
        try:
            request.machine.offered(info.rank, part, message.slot, slots=slots, size_bytes=message.size_bytes)
            movement = receiver.movement(message)
        except ProtocolError as error:
            self._fail(request, error, reported_by=info)
            raise

        def ended(error: KVStoreError | None) -> None:
            if error is None and request.machine.error is None:
                self._taken(request, info.rank, part, message.size_bytes)
                answer(None)
                self._settle(request)
            else:
                self._transfer_failed(request, error, answer)

        if movement is None:
            ended(None)
        else:
            request.ending.track(movement, ended)

    def _taken(self, request: _ReceivingRequest, rank: int, part: PartId, size_bytes: int) -> None:
        request.machine.taken(rank, part, size_bytes)
        request.handle.received_bytes = request.machine.received_bytes

    def _transfer_failed(self, request: _ReceivingRequest, error: KVStoreError | None, answer: Answer) -> None:
        """Fail the request after a failed transfer, and reply to the sender once the reason is certain."""

        def fail() -> None:
            if error is not None:
                self._fail(request, error)
            answer(request.machine.error)

        if isinstance(error, StaleHandle | Unreachable | Closed) and request.machine.error is None:
            self._resources.reactor.call_later(REASON_GRACE_S, fail)
        else:
            fail()

    def _find(self, info: RankInfo, request_id: bytes) -> tuple[_ReceivingRequest, PartReceiver]:
        request = self._requests.get(request_id)
        receiver = request.receivers.get(info.rank) if request is not None else None
        if request is None or receiver is None or receiver.info.instance != info.instance:
            raise StaleHandle("this rank does not receive this request, or no longer")
        if request.machine.error is not None:
            raise request.machine.error
        return request, receiver

    def _expire(self, request: _ReceivingRequest) -> None:
        what = "no sender has begun" if request.machine.state is RequestState.WAITING else "it did not arrive completely"
        self._fail(request, DeadlineExceeded(f"request {request.handle.request_id!r}: {what} by its deadline"))
