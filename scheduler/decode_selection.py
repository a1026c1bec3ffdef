"""What all dispatchers share: SelectDecodingInstance, and the SLOs that a placement must keep. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.scheduler.decision import Reason, Rejection
from kvstore.scheduler.estimators.interface import DecodeTime
from kvstore.scheduler.instances import DecodeInstance
from kvstore.scheduler.request import Request, Slo


class Decoding(NamedTuple):
    """The sequence would be decoded by decode[`instance`], a token each `tbt_s`."""

    instance: int
    tbt_s: float


def select_decoding_instance(request: Request, decode: Sequence[DecodeInstance], estimator: DecodeTime) -> Decoding | Rejection:
    """The one with the least time between tokens once the request is there, of those whose cache has room for it and for all its output;
    ties: the least context, then the first. Reason.NO_INSTANCE without any; Reason.CAPACITY, in tokens, without one that has room.
    """
    sequence_tokens = request.input_tokens + request.output_tokens
    best: tuple[float, int, int] | None = None
    foreseen: dict[tuple[int, int], float] = {}
    for index, instance in enumerate(decode):
        if instance.context_tokens + sequence_tokens > instance.capacity_tokens:
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
    if not decode:
        return Rejection(Reason.NO_INSTANCE)
    room_tokens = max(instance.capacity_tokens - instance.context_tokens for instance in decode)
    return Rejection(Reason.CAPACITY, sequence_tokens, room_tokens)


def broken_slo(slo: Slo, *, ttft_s: float, tbt_s: float) -> Rejection | None:
    """Why a placement may not be taken, with the value and the limit in seconds; None: it keeps both SLOs."""
    if ttft_s > slo.ttft_s:
        return Rejection(Reason.TTFT, ttft_s, slo.ttft_s)
    if tbt_s > slo.tbt_s:
        return Rejection(Reason.TBT, tbt_s, slo.tbt_s)
    return None
