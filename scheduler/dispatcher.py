"""Interface of a dispatcher, which chooses the instances of a request, and the choice of the decode instance that all dispatchers share.

Dispatchers: Algorithm 1 (kvcache_centric.py) and its baselines (baselines.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvstore.scheduler.estimators.interface import DecodeTime, PrefillTime, TransferTime
from kvstore.scheduler.request import Decision, DecodeInstance, PrefillInstance, Reason, Rejection, ScheduleRequest, Slo


@dataclass(frozen=True, slots=True)
class Estimators:
    """All that a dispatcher foresees with, and the size of a block in bytes."""

    prefill: PrefillTime
    decode: DecodeTime
    transfer: TransferTime
    block_bytes: int


class Dispatcher(ABC):
    """Chooses a prefill and a decode instance for each request. Not thread-safe; it changes no instance it is shown.

    `matches[i]` is the number of leading blocks of the prompt that prefill[i] need not compute: the answer of a PrefixIndex. `sendable[i]`
    is how many of them others can fetch from it: fewer where it has some in its GPU's memory only; None: all. Either sequence of
    instances may be empty (Reason.NO_INSTANCE). What is prefilled where `decodes_at` is set is decoded there.
    """

    name: ClassVar[str]

    @abstractmethod
    def dispatch(
        self,
        request: ScheduleRequest,
        matches: Sequence[int],
        prefill: Sequence[PrefillInstance],
        decode: Sequence[DecodeInstance],
        sendable: Sequence[int] | None = None,
    ) -> Decision | Rejection:
        """Where `request` goes, or why nowhere."""


class Decoding(NamedTuple):
    """The sequence would be decoded by decode[`instance`], a token each `tbt_s`."""

    instance: int
    tbt_s: float


def select_decoding_instance(request: ScheduleRequest, decode: Sequence[DecodeInstance], estimator: DecodeTime) -> Decoding | Rejection:
    """The one with the least time between tokens once the request is there, of those that take what others have prefilled and whose cache
    has room for it and for all its output; ties: the least context, then the first. Reason.NO_INSTANCE without any; Reason.CAPACITY, in
    tokens, without one that has room.
    """
    return _select(request, [(index, instance) for index, instance in enumerate(decode) if not instance.is_own], estimator, {})


def decodings(
    request: ScheduleRequest, prefill: Sequence[PrefillInstance], decode: Sequence[DecodeInstance], estimator: DecodeTime
) -> Mapping[int, Decoding | Rejection]:
    """The prefill instances to choose among, in order, and where the request would be decoded after each: as `select_decoding_instance`, or
    by itself if it decodes what it prefills.

    One after which there is no room, or tokens would come too slowly, is left out as long as another is better. Without room anywhere all
    are there, with one Reason.CAPACITY for the largest room, or Reason.NO_INSTANCE.
    """
    elsewhere = select_decoding_instance(request, decode, estimator)
    if all(one.decodes_at is None for one in prefill):
        return dict.fromkeys(range(len(prefill)), elsewhere)
    foreseen: dict[tuple[int, int], float] = {}
    found = {
        number: elsewhere if (own := one.decodes_at) is None else _select(request, [(own, decode[own])], estimator, foreseen)
        for number, one in enumerate(prefill)
    }
    fits = {number: place for number, place in found.items() if isinstance(place, Decoding)}
    if fits:
        return {number: place for number, place in fits.items() if place.tbt_s <= request.slo.tbt_s} or fits
    reasons = [why for why in found.values() if isinstance(why, Rejection)]
    return dict.fromkeys(found, max(reasons, key=lambda why: (why.reason is Reason.CAPACITY, why.limit)))


def _fits(request: ScheduleRequest, instance: DecodeInstance) -> bool:
    return instance.context_tokens + request.input_tokens + request.output_tokens <= instance.capacity_tokens


def _select(
    request: ScheduleRequest, among: Sequence[tuple[int, DecodeInstance]], estimator: DecodeTime, foreseen: dict[tuple[int, int], float]
) -> Decoding | Rejection:
    """`foreseen`: TBT by batch and context, as far as it was asked for this request."""
    best: tuple[float, int, int] | None = None
    for index, instance in among:
        if not _fits(request, instance):
            continue
        load = (instance.batch + 1, instance.context_tokens + request.input_tokens)
        tbt_s = foreseen.get(load)
        if tbt_s is None:
            tbt_s = foreseen[load] = estimator.tbt_s(*load)
        candidate = (tbt_s, instance.context_tokens, index)
        if best is None or candidate < best:
            best = candidate
    if best is not None:
        return Decoding(best[2], best[0])
    if not among:
        return Rejection(Reason.NO_INSTANCE)
    room_tokens = max(instance.capacity_tokens - instance.context_tokens for _, instance in among)
    return Rejection(Reason.CAPACITY, request.input_tokens + request.output_tokens, room_tokens)


def broken_slo(slo: Slo, *, ttft_s: float, tbt_s: float) -> Rejection | None:
    """Why a placement may not be taken, with the value and the limit in seconds; None: it keeps both SLOs."""
    if ttft_s > slo.ttft_s:
        return Rejection(Reason.TTFT, ttft_s, slo.ttft_s)
    if tbt_s > slo.tbt_s:
        return Rejection(Reason.TBT, tbt_s, slo.tbt_s)
    return None
