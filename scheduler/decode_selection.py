"""What all dispatchers share: SelectDecodingInstance, and the SLOs that a placement must keep. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.scheduler.decision import Reason, Rejection
from kvstore.scheduler.estimators.interface import DecodeTime
from kvstore.scheduler.instances import DecodeInstance, PrefillInstance
from kvstore.scheduler.request import Request, Slo


class Decoding(NamedTuple):
    """The sequence would be decoded by decode[`instance`], a token each `tbt_s`."""

    instance: int
    tbt_s: float


def select_decoding_instance(request: Request, decode: Sequence[DecodeInstance], estimator: DecodeTime) -> Decoding | Rejection:
    """The one with the least time between tokens once the request is there, of those that take what others have prefilled and whose cache
    has room for it and for all its output; ties: the least context, then the first. Reason.NO_INSTANCE without any; Reason.CAPACITY, in
    tokens, without one that has room.
    """
    return _select(request, [(index, instance) for index, instance in enumerate(decode) if not instance.is_own], estimator)


def decoding_after(
    prefill: PrefillInstance, request: Request, decode: Sequence[DecodeInstance], estimator: DecodeTime
) -> Decoding | Rejection:
    """Where a request is decoded that is prefilled there: as `select_decoding_instance`, or by itself if it decodes what it prefills."""
    if prefill.decodes_at is None:
        return select_decoding_instance(request, decode, estimator)
    return _select(request, [(prefill.decodes_at, decode[prefill.decodes_at])], estimator)


def has_room(prefill: PrefillInstance, request: Request, decode: Sequence[DecodeInstance]) -> bool:
    """False for one that decodes what it prefills and whose cache has no room for the request and all its output."""
    return prefill.decodes_at is None or _fits(request, decode[prefill.decodes_at])


def goes_to_own_only(request: Request, prefill: Sequence[PrefillInstance], decode: Sequence[DecodeInstance], estimator: DecodeTime) -> bool:
    """Whether only those can serve it that decode what they prefill: one has room, and where all others' requests are decoded there is
    none, or tokens would come too slowly."""
    if not any(instance.decodes_at is not None and has_room(instance, request, decode) for instance in prefill):
        return False
    elsewhere = select_decoding_instance(request, decode, estimator)
    return isinstance(elsewhere, Rejection) or elsewhere.tbt_s > request.slo.tbt_s


def _fits(request: Request, instance: DecodeInstance) -> bool:
    return instance.context_tokens + request.input_tokens + request.output_tokens <= instance.capacity_tokens


def _select(request: Request, among: Sequence[tuple[int, DecodeInstance]], estimator: DecodeTime) -> Decoding | Rejection:
    best: tuple[float, int, int] | None = None
    foreseen: dict[tuple[int, int], float] = {}
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
