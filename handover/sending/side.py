"""Sending side of a rank: its requests, and receivers' requests that arrive before them. Carries out what CacheSender
decides.

The reactor's thread makes all calls; part_sender.py documents what runs elsewhere.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.handover.description import RankInfo, RemoteExecutor
from kvstore.handover.handles import SendHandle
from kvstore.handover.movements.movement import MovementEnd
from kvstore.handover.movements.parts import RequestState
from kvstore.handover.resources import REASON_GRACE_S, RankResources, plan_of, remapping_of
from kvstore.handover.sending.part_sender import PartSender
from kvstore.handover.sending.request import CacheSender, PartOffer
from kvstore.handover.side import HandoverSide, SideRequest
from kvstore.protocol.errors import Closed, DeadlineExceeded, Full, InvalidArgument, KVStoreError, StaleHandle, Unreachable, typed
from kvstore.protocol.handover_messages import ExportRegions, PartReady, ReadsDone, RequestCache

MAX_EARLY_REQUESTS: Final = 65_536
"""Request ids for which receivers' requests arrived early."""


@dataclass(slots=True, eq=False)
class _SendingRequest(SideRequest):
    handle: SendHandle
    machine: CacheSender
    blocks: NDArray[np.int64] = field(kw_only=True)
    tokens: int = field(kw_only=True)
    to: RemoteExecutor | None = field(kw_only=True)
    senders: dict[int, PartSender] = field(default_factory=dict)

    @property
    def movers(self) -> Collection[PartSender]:
        return self.senders.values()


class SenderSide(HandoverSide[_SendingRequest]):
    """Requests that this rank sends."""

    def __init__(self, resources: RankResources) -> None:
        super().__init__(resources)
        self._early_requests: dict[bytes, dict[bytes, tuple[RankInfo, RequestCache, int]]] = {}
        """Receivers' requests that arrived before `begin`, by request id and instance, with their deadlines."""

    @property
    def early_request_count(self) -> int:
        """Number of receivers' requests that wait for `begin`."""
        return sum(map(len, self._early_requests.values()))

    # --- events ---

    def begin(self, handle: SendHandle, blocks: NDArray[np.int64], tokens: int, to: RemoteExecutor | None, deadline_ns: int) -> None:
        """Start to send a request."""
        resources = self._resources
        machine = CacheSender(resources.layout.rank_layers(resources.rank), batch_bytes=resources.settings.min_layer_batch_bytes)
        ending = MovementEnd(resources.reactor, resources.settings.fence_timeout_s, lambda is_fenced: self._finish(request, is_fenced))
        request = _SendingRequest(handle, machine, ending, deadline_ns, blocks=blocks, tokens=tokens, to=to)
        self._requests[handle.request_id] = request
        ending.expire_at(deadline_ns, lambda: self._expire(request))
        resources.begun(handle.request_id, deadline_ns)
        for info, ask, until_ns in self._early_requests.pop(handle.request_id, {}).values():
            try:
                self._join(request, info, ask, until_ns)
            except Exception as error:
                resources.stop(info, handle.request_id, typed(error))
                self._fail(request, typed(error), reported_by=info)
        self._send_due(request)

    def ask(self, info: RankInfo, message: RequestCache, until_ns: int) -> None:
        """A receiver rank requests a request's parts. Raises the error that the request fails with."""
        request = self._requests.get(message.request_id)
        if request is None:
            if len(self._early_requests) >= MAX_EARLY_REQUESTS:
                raise Full(
                    f"receivers have requested {MAX_EARLY_REQUESTS} requests that did not begin here: retry once the sender has begun"
                )
            self._early_requests.setdefault(message.request_id, {})[info.instance] = (info, message, until_ns)
            return
        try:
            self._join(request, info, message, until_ns)
        except Exception as error:
            self._fail(request, typed(error), reported_by=info)
            raise
        self._resources.reactor.call_soon(lambda: self._send_due(request))  # after the reply: parts must not overtake it

    def layer_ready(self, request_id: bytes, layer: int | None) -> None:
        """A layer, or (None) every layer, is in the blocks."""
        request = self._requests.get(request_id)
        if request is not None:
            own = self._resources.layout.rank_layers(self._resources.rank)
            for one in own if layer is None else range(layer, layer + 1):
                if one in own:
                    request.machine.layer_ready(one)
            self._send_due(request)

    def fail(self, request_id: bytes, error: KVStoreError, reported_by: RankInfo | None = None) -> bool:
        self._early_requests.pop(request_id, None)
        return super().fail(request_id, error, reported_by)

    def lost(self, info: RankInfo, error: KVStoreError) -> None:
        super().lost(info, error)
        for asks in self._early_requests.values():
            asks.pop(info.instance, None)

    def expire(self, now_ns: int) -> None:
        """Drop early requests whose deadline has passed."""
        for request_id, asks in list(self._early_requests.items()):
            for instance in [instance for instance, (_, _, until_ns) in asks.items() if until_ns <= now_ns]:
                del asks[instance]
            if not asks:
                del self._early_requests[request_id]

    def _expire(self, request: _SendingRequest) -> None:
        what = "a receiver did not request it" if request.machine.state is RequestState.WAITING else "not every receiver has all of it"
        self._fail(request, DeadlineExceeded(f"request {request.handle.request_id!r}: {what} by its deadline"))

    # --- receivers ---

    def _join(self, request: _SendingRequest, info: RankInfo, ask: RequestCache, until_ns: int) -> None:
        """Add a receiver rank. Raises the error that fails the request on both sides."""
        resources = self._resources
        if request.machine.state is RequestState.OVER:
            raise request.machine.error or StaleHandle("this request is over")
        self._check(request, info, ask)
        remapping = remapping_of(resources.layout, info.layout, source_dp=resources.dp, destination_dp=info.dp)
        receivers = remapping.receivers_of(resources.rank)
        request.machine.expect(receivers)
        if info.rank in receivers:
            plan = plan_of(remapping, resources.rank, info.rank, first_token=ask.first_token, tokens=ask.tokens, part_bytes=ask.part_bytes)
            request.machine.asked(info.rank, plan, slots=ask.slots)
            deadline_ns = min(until_ns, request.deadline_ns)
            sender = PartSender(resources, info, ask, remapping, plan, request.blocks, deadline_ns=deadline_ns)
            request.senders[info.rank] = sender
            if plan.unit_count:
                self._open(request, sender)
        request.asked[info.rank] = info

    def _check(self, request: _SendingRequest, info: RankInfo, ask: RequestCache) -> None:
        """Validate a receiver's request. Raises InvalidArgument, StaleHandle."""
        if ask.tokens != request.tokens:
            raise InvalidArgument(f"the sender has {request.tokens} tokens of this request, the receiver requests {ask.tokens}")
        if ask.dp != self._resources.dp:
            raise InvalidArgument(f"the receiver requests attention-DP group {ask.dp}; this rank is in group {self._resources.dp}")
        if request.to is not None and info.instance not in {rank.instance for rank in request.to.ranks}:
            raise StaleHandle("the receiver is not the executor in `to`, or is an earlier run of it")
        if any(asked.layout != info.layout or asked.dp != info.dp for asked in request.asked.values()):
            raise InvalidArgument("ranks with different layouts request this: they are not of one executor")

    def _open(self, request: _SendingRequest, sender: PartSender) -> None:
        sender.open()
        if (message := sender.show()) is not None:
            self._send(request, sender, message, lambda: None)

    def _send(
        self, request: _SendingRequest, sender: PartSender, message: ExportRegions | PartReady | ReadsDone, on_ok: Callable[[], None]
    ) -> None:
        def on_answer(error: KVStoreError | None) -> None:
            if error is not None:
                self._fail(request, error)
            elif request.machine.error is None:
                on_ok()

        self._resources.connections.send_request(
            sender.info, message, deadline_s=self._resources.left_s(sender.deadline_ns), on_answer=on_answer
        )

    # --- parts ---

    def _send_due(self, request: _SendingRequest) -> None:
        for offer in request.machine.due():
            if request.machine.error is not None:  # sending the previous part failed at once
                break
            self._go(request, request.senders[offer.rank], offer)
        self._settle(request)

    def _go(self, request: _SendingRequest, sender: PartSender, offer: PartOffer) -> None:
        """Transfer a part and announce it to the receiver."""
        message = sender.message(offer)

        def send_request() -> None:
            self._send(request, sender, message, lambda: self._acknowledged(request, offer, message.size_bytes))

        def moved(error: KVStoreError | None) -> None:
            if error is not None:
                self._transfer_failed(request, error)
            elif not sender.reads_pool and request.machine.error is None:
                send_request()

        if sender.reads_pool:
            send_request()
        if request.machine.error is not None:  # the peer is unreachable: the request may be over and its blocks reused
            return
        movement = sender.movement(offer, message.size_bytes)
        if movement is not None:
            request.ending.track(movement, moved)

    def _transfer_failed(self, request: _SendingRequest, error: KVStoreError) -> None:
        if isinstance(error, StaleHandle | Unreachable | Closed):
            self._resources.reactor.call_later(REASON_GRACE_S, lambda: self._fail(request, error))
        else:
            self._fail(request, error)

    def _acknowledged(self, request: _SendingRequest, offer: PartOffer, size_bytes: int) -> None:
        machine = request.machine
        machine.acknowledged(offer.rank, offer.part, size_bytes)
        sender = request.senders[offer.rank]
        if sender.confirms and not machine.needs(offer.rank):
            self._send(request, sender, ReadsDone(request.handle.request_id), lambda: None)
        request.handle.sent_bytes, request.handle.overlap_bytes = machine.sent_bytes, machine.overlap_bytes
        self._send_due(request)
