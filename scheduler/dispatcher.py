"""Dispatcher interface, and the choice of the decode instance that all dispatchers share.

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
    """Time estimators of a dispatcher, and the size of a block in bytes."""

    prefill: PrefillTime
    decode: DecodeTime
    transfer: TransferTime
    block_bytes: int


class Dispatcher(ABC):
    """Chooses a prefill and a decode instance for each request. Not thread-safe; it does not modify instances.

    `matches[i]` is the number of leading blocks of the prompt that prefill[i] has, from a PrefixIndex. `sendable[i]` is
    how many of them other instances can fetch, fewer if some are only in GPU memory; None: all. Either sequence of
    instances may be empty (Reason.NO_INSTANCE). A request prefilled on an instance with `decodes_at` is decoded there.
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
        """Placement of `request`, or the reason of its rejection."""


class Decoding(NamedTuple):
    """Decode instance of a request, with the predicted time per token."""

    instance: int
    tbt_s: float


def select_decoding_instance(request: ScheduleRequest, decode: Sequence[DecodeInstance], estimator: DecodeTime) -> Decoding | Rejection:
    """The decode instance with the least predicted TBT, among those that accept prefilled requests and have cache space
    for the request and its output; ties: the least context, then the first.

    Rejects with Reason.NO_INSTANCE without instances, and with Reason.CAPACITY, in tokens, if none has space.
    """
    return _select(request, [(index, instance) for index, instance in enumerate(decode) if not instance.is_own], estimator, {})


def decode_choices(
    request: ScheduleRequest, prefill: Sequence[PrefillInstance], decode: Sequence[DecodeInstance], estimator: DecodeTime
) -> Mapping[int, Decoding | Rejection]:
    """Decode choice by eligible prefill instance, in order: as `select_decoding_instance`, or the instance itself if it
    decodes its own requests.

    Instances without cache space, or over the TBT SLO, are left out while a better one exists. Without space anywhere,
    all get one Reason.CAPACITY with the largest free space, or Reason.NO_INSTANCE.
    """
    elsewhere = select_decoding_instance(request, decode, estimator)
    if all(one.decodes_at is None for one in prefill):
        return dict.fromkeys(range(len(prefill)), elsewhere)
    predicted: dict[tuple[int, int], float] = {}
    found = {
        number: elsewhere if (own := one.decodes_at) is None else _select(request, [(own, decode[own])], estimator, predicted)
        for number, one in enumerate(prefill)
    }
    fits = {number: choice for number, choice in found.items() if isinstance(choice, Decoding)}
    if fits:
        return {number: choice for number, choice in fits.items() if choice.tbt_s <= request.slo.tbt_s} or fits
    reasons = [why for why in found.values() if isinstance(why, Rejection)]
    return dict.fromkeys(found, max(reasons, key=lambda why: (why.reason is Reason.CAPACITY, why.limit)))


def _fits(request: ScheduleRequest, instance: DecodeInstance) -> bool:
    return instance.context_tokens + request.input_tokens + request.output_tokens <= instance.capacity_tokens


def _select(
    request: ScheduleRequest, among: Sequence[tuple[int, DecodeInstance]], estimator: DecodeTime, predicted: dict[tuple[int, int], float]
) -> Decoding | Rejection:
    """`predicted` caches TBT by batch and context for this request."""
    best: tuple[float, int, int] | None = None
    for index, instance in among:
        if not _fits(request, instance):
            continue
        load = (instance.batch + 1, instance.context_tokens + request.input_tokens)
        tbt_s = predicted.get(load)
        if tbt_s is None:
            tbt_s = predicted[load] = estimator.tbt_s(*load)
        candidate = (tbt_s, instance.context_tokens, index)
        if best is None or candidate < best:
            best = candidate
    if best is not None:
        return Decoding(best[2], best[0])
    if not among:
        return Rejection(Reason.NO_INSTANCE)
    free_tokens = max(instance.capacity_tokens - instance.context_tokens for _, instance in among)
    return Rejection(Reason.CAPACITY, request.input_tokens + request.output_tokens, free_tokens)


def check_slo(slo: Slo, *, ttft_s: float, tbt_s: float) -> Rejection | None:
    """Rejection of a placement that violates an SLO, with value and limit in seconds; None if it meets both."""
    if ttft_s > slo.ttft_s:
        return Rejection(Reason.TTFT, ttft_s, slo.ttft_s)
    if tbt_s > slo.tbt_s:
        return Rejection(Reason.TBT, tbt_s, slo.tbt_s)
    return None
