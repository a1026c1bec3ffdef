"""Admission control by the load of both pools (early rejection). Pure arithmetic on counts.

A request that the decode pool cannot take after its prefill has wasted that prefill. Rejection by the decode load at
arrival fails differently. It ignores the load that requests in prefill will add, so too many are admitted; when they
reach the decode pool, too many are rejected, until the prefill pool is idle. Both loads oscillate out of phase. The
relevant load is that of the decode pool when this prefill ends.

A caller dispatches without the TBT SLO (which a dispatcher checks against all promised work), passes the predicted TTFT
to `on_arrival`, and calls `on_decode` when the prefill is over.

Source: Qin et al., "Mooncake", arXiv:2407.00079v3, section 7 (early rejection, and early rejection based on prediction;
load as a share of the SLO).
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
    """Load of both pools at `now_s`."""

    now_s: float
    decode_instances: int
    """At least 1."""
    decode_begun_s: Times
    """Start time of each sequence being decoded, ascending."""
    prefill_ends_s: Times
    """Predicted end of prefill of each admitted request that is not decoded yet, in any order."""
    decode_s: float
    """Mean duration of decoding; 0: unknown, no sequence is assumed to end."""
    context_tokens: float
    """Mean context of a decoded sequence."""


class AdmissionPolicy(ABC):
    """Admits or rejects requests. Stateless."""

    name: ClassVar[str]

    def __init__(self, decode: DecodeTime, *, load_limit: float = 1.0) -> None:
        """`load_limit`: maximum load of a pool, as a share of the SLO.

        Raises:
            InvalidArgument: it is not above 0.
        """
        if not load_limit > 0:
            raise InvalidArgument(f"load_limit is {load_limit:g}: it must be above 0")
        self._decode = decode
        self._load_limit = load_limit

    @abstractmethod
    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        """Decide at arrival; None: admit to prefill. `ttft_s` is the predicted time until its prefill ends."""

    def on_decode(self, load: PoolLoad, slo: Slo) -> Rejection | None:
        """Decide after the prefill; None: admit to decode. The request is no longer in `load.prefill_ends_s`."""
        return self._decode_load(len(load.decode_begun_s), load, slo)

    def _decode_load(self, sequences: float, load: PoolLoad, slo: Slo) -> Rejection | None:
        """Load with `sequences`, evenly distributed, and this request."""
        batch = int(sequences / load.decode_instances) + 1
        tbt_s = self._decode.tbt_s(batch, round(batch * load.context_tokens))
        limit_s = self._load_limit * slo.tbt_s
        return Rejection(Reason.DECODE_LOAD, tbt_s, limit_s) if tbt_s > limit_s else None

    def _prefill_load(self, ttft_s: float, slo: Slo) -> Rejection | None:
        limit_s = self._load_limit * slo.ttft_s
        return Rejection(Reason.PREFILL_LOAD, ttft_s, limit_s) if ttft_s > limit_s else None


class AdmitAll(AdmissionPolicy):
    """Admits every request."""

    name = "all"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        return None

    def on_decode(self, load: PoolLoad, slo: Slo) -> Rejection | None:
        return None


class RejectLate(AdmissionPolicy):
    """Baseline: checks the prefill load at arrival, and the decode load after the prefill."""

    name = "late"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        return self._prefill_load(ttft_s, slo)


class RejectEarly(AdmissionPolicy):
    """Checks both current loads at arrival; the request may still be rejected after its prefill."""

    name = "early"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        return self._prefill_load(ttft_s, slo) or self._decode_load(len(load.decode_begun_s), load, slo)


class RejectByPrediction(AdmissionPolicy):
    """Checks both loads predicted for the end of the prefill, with a constant chance of a sequence to end at any age.

    O(requests in prefill), as an array. Output lengths vary about that much, so the prediction has no cliff. The
    published form below, where all end at one age, admits a burst every load.decode_s when a prefill takes nearly as
    long.
    """

    name = "predicted"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        sequences = expected_decoding(load.now_s + ttft_s, load)
        return self._prefill_load(ttft_s, slo) or self._decode_load(sequences, load, slo)


class RejectByUniformPrediction(AdmissionPolicy):
    """As RejectByPrediction, with exactly load.decode_s of decoding per sequence, as published. O(requests in prefill),
    as an array."""

    name = "predicted_uniform"

    def on_arrival(self, load: PoolLoad, slo: Slo, *, ttft_s: float) -> Rejection | None:
        sequences = uniformly_decoding(load.now_s + ttft_s, load)
        return self._prefill_load(ttft_s, slo) or self._decode_load(sequences, load, slo)


def expected_decoding(at_s: float, load: PoolLoad) -> float:
    """Expected sequences being decoded at `at_s`, among those now and those whose prefill ends by then, with a constant
    chance to end."""
    decode_s = load.decode_s or math.inf
    staying = len(load.decode_begun_s) * math.exp((load.now_s - at_s) / decode_s)
    ends_s = np.asarray(load.prefill_ends_s, np.float64)
    return staying + float(np.exp((ends_s[ends_s <= at_s] - at_s) / decode_s).sum())


def uniformly_decoding(at_s: float, load: PoolLoad) -> int:
    """Sequences being decoded at `at_s`: those now or whose prefill ends by then, begun less than decode_s before.

    A sequence that has been decoded for longer counts as ended.
    """
    since_s = at_s - (load.decode_s or math.inf)
    ended = bisect_right(load.decode_begun_s, since_s)
    ends_s = np.asarray(load.prefill_ends_s, np.float64)
    return len(load.decode_begun_s) - ended + int(np.count_nonzero((since_s < ends_s) & (ends_s <= at_s)))


ADMISSIONS: Final[dict[str, type[AdmissionPolicy]]] = {
    kind.name: kind for kind in (AdmitAll, RejectLate, RejectEarly, RejectByPrediction, RejectByUniformPrediction)
}


def make_admission(name: str, decode: DecodeTime, *, load_limit: float = 1.0) -> AdmissionPolicy:
    """The admission policy of this name, a key of ADMISSIONS.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
        InvalidArgument: load_limit is not above 0.
    """
    kind = ADMISSIONS.get(name)
    if kind is None:
        raise ConfigError(f"no admission is named {name!r}: take one of {', '.join(ADMISSIONS)}")
    return kind(decode, load_limit=load_limit)
