"""Early rejection: whether a request that could be placed should be taken on, by the load of both pools. Pure arithmetic on counts.

A request that the decode pool cannot take once its prefill is over has cost a prefill for nothing. To reject it at arrival by the decode
load of that moment fails another way: the load that those in prefill will make is not seen yet, so too many are taken; then it comes all
at once and too many are rejected, until the prefill pool is idle. Both loads swing, out of phase. What has to be asked is the decode load
at the time when this prefill will be over.

Who uses it dispatches without the SLO on TBT (which a dispatcher checks against all that is promised), asks `on_arrival` with the TTFT of
the decision, and `on_decode` when the prefill is over.

Source: Qin et al., "Mooncake", arXiv:2407.00079v3, section 7 (early rejection, and that based on prediction; load as a share of the SLO).
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.scheduler.estimators.interface import DecodeTime
from kvstore.scheduler.request import Reason, Rejection, Slo

Times = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Both pools at `now_s`."""

    now_s: float
    decode_instances: int
    """At least one."""
    decode_begun_s: Times
    """When each sequence that is being decoded began to be, ascending."""
    prefill_ends_s: Times
    """When the prefill of each request that was taken on and is not decoded yet will be over, as predicted, in any order."""
    decode_s: float
    """How long a sequence is decoded, on average; 0: not known yet, none is taken to end."""
    context_tokens: float
    """Of a sequence that is decoded, on average."""


class AdmissionPolicy(ABC):
    """Takes a request on or rejects it. It keeps nothing."""

    name: ClassVar[str]

    def __init__(self, decode: DecodeTime, *, load_limit: float = 1.0) -> None:
        """`load_limit`: the share of an SLO that a pool may be loaded to.

        Raises:
            InvalidArgument: it is not above 0.
        """
        if not load_limit > 0:
            raise InvalidArgument(f"load_limit is {load_limit:g}: it must be above 0")
        self._decode = decode
        self._load_limit = load_limit

    @abstractmethod
    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        """None: it shall be prefilled. `ttft_s`: from now to the end of its prefill, as predicted."""

    def on_decode(self, load: PoolLoad, slo: Slo) -> Rejection | None:
        """None: it shall be decoded. Its prefill is over, and it is no longer in `load.prefill_ends_s`."""
        return self._decode_load(len(load.decode_begun_s), load, slo)

    def _decode_load(self, sequences: float, load: PoolLoad, slo: Slo) -> Rejection | None:
        """With `sequences`, spread evenly, and this one."""
        batch = int(sequences / load.decode_instances) + 1
        tbt_s = self._decode.tbt_s(batch, round(batch * load.context_tokens))
        limit_s = self._load_limit * slo.tbt_s
        return Rejection(Reason.DECODE_LOAD, tbt_s, limit_s) if tbt_s > limit_s else None

    def _prefill_load(self, ttft_s: float, slo: Slo) -> Rejection | None:
        limit_s = self._load_limit * slo.ttft_s
        return Rejection(Reason.PREFILL_LOAD, ttft_s, limit_s) if ttft_s > limit_s else None


class AdmitAll(AdmissionPolicy):
    """Whatever the load."""

    name = "all"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        return None

    def on_decode(self, load: PoolLoad, slo: Slo) -> Rejection | None:
        return None


class RejectLate(AdmissionPolicy):
    """The baseline: by the prefill load at arrival, by the decode load when the prefill has been done."""

    name = "late"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        return self._prefill_load(ttft_s, slo)


class RejectEarly(AdmissionPolicy):
    """By both loads as they are at arrival; what gets past that may still be rejected when its prefill has been done."""

    name = "early"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        return self._prefill_load(ttft_s, slo) or self._decode_load(len(load.decode_begun_s), load, slo)


class RejectByPrediction(AdmissionPolicy):
    """By both loads as they will be when the prefill is over, the end of a sequence being as likely at any age.

    O(requests in prefill), as an array. Lengths of output vary about that much, and then what is foreseen has no cliff: the published form
    below, where all end at one age, takes on a burst every load.decode_s when a prefill takes nearly as long.
    """

    name = "predicted"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        sequences = expected_decoding(load.now_s + ttft_s, load)
        return self._prefill_load(ttft_s, slo) or self._decode_load(sequences, load, slo)


class RejectByUniformPrediction(AdmissionPolicy):
    """As RejectByPrediction, each sequence being decoded for exactly load.decode_s, as published. O(requests in prefill), as an array."""

    name = "predicted_uniform"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        sequences = uniformly_decoding(load.now_s + ttft_s, load)
        return self._prefill_load(ttft_s, slo) or self._decode_load(sequences, load, slo)


def expected_decoding(at_s: float, load: PoolLoad) -> float:
    """Sequences that will be decoded at `at_s`: of those that are now, and of those whose prefill is over by then, what is expected to be
    left when the chance to end is the same at any age.
    """
    decode_s = load.decode_s or math.inf
    staying = len(load.decode_begun_s) * math.exp((load.now_s - at_s) / decode_s)
    ends_s = np.asarray(load.prefill_ends_s, np.float64)
    return staying + float(np.exp((ends_s[ends_s <= at_s] - at_s) / decode_s).sum())


def uniformly_decoding(at_s: float, load: PoolLoad) -> int:
    """Sequences that will be decoded at `at_s`: those that are now or whose prefill is over by then, and began less than decode_s before.

    One that has been decoded for longer than that already is taken to end now.
    """
    since_s = at_s - (load.decode_s or math.inf)
    ended = bisect_right(load.decode_begun_s, since_s)
    ends_s = np.asarray(load.prefill_ends_s, np.float64)
    return len(load.decode_begun_s) - ended + int(np.count_nonzero((since_s < ends_s) & (ends_s <= at_s)))


ADMISSIONS: Final[dict[str, type[AdmissionPolicy]]] = {
    kind.name: kind for kind in (AdmitAll, RejectLate, RejectEarly, RejectByPrediction, RejectByUniformPrediction)
}


def make_admission(name: str, decode: DecodeTime, *, load_limit: float = 1.0) -> AdmissionPolicy:
    """The admission of this name, a key of ADMISSIONS.

    Raises:
        ConfigError: there is none of this name; the message lists those there are.
        InvalidArgument: load_limit is not above 0.
    """
    kind = ADMISSIONS.get(name)
    if kind is None:
        raise ConfigError(f"no admission is named {name!r}: take one of {', '.join(ADMISSIONS)}")
    return kind(decode, load_limit=load_limit)
