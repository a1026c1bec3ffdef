"""The load of both pools as the master can know it, for early rejection (scheduler/admission.py). Pure, but for what it remembers of each
instance: a decision reads anew only those to which or from which something came since the one before.

Instances report how many sequences they decode, not since when. So each is taken to be half through: who asks when the next one ends
(`predicted_uniform`) cannot be used live, who only counts them can.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvstore.master.scheduling.instances import NS_PER_S, DecodeMember
from kvstore.scheduler.admission import PoolLoad

SMOOTHING: Final = 0.05
"""The weight of the latest request in the average of how long sequences are decoded: about twenty requests count."""


class DecodeDuration:
    """How long a sequence is decoded, on average of late, as foreseen when each was scheduled; 0: not known yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """One request more."""
        self.seconds += (seconds - self.seconds) * (SMOOTHING if self.seconds else 1.0)


class _Arrivals(NamedTuple):
    """When what was promised to an instance should come in, as of so many promises made and left.

    These two tell one set of promises from any other of the same instance: a new one adds to the first, and till then they only grow fewer.
    """

    scheduled: int
    unseen: int
    at_s: npt.NDArray[np.float64]


_known: WeakKeyDictionary[DecodeMember, _Arrivals] = WeakKeyDictionary()


def pool_load(decode: Iterable[DecodeMember], *, decode_s: float, input_tokens: int, now_ns: int) -> PoolLoad:
    """The load now. `decode_s`: how long a sequence is decoded; `input_tokens`: the context of a sequence where none is decoded yet.

    O(instances, and promises to those of them where these have changed), and a copy of 8 bytes for each promise.
    """
    members = list(decode)
    batch = sum(member.report.batch for member in members)
    context_tokens = sum(member.report.context_tokens for member in members)
    now_s = now_ns / NS_PER_S
    return PoolLoad(
        now_s=now_s,
        decode_instances=len(members),
        decode_begun_s=np.broadcast_to(np.float64(now_s - decode_s / 2), batch),  # one number, however long
        prefill_ends_s=np.concatenate([_arrivals_s(member) for member in members]),
        decode_s=decode_s,
        context_tokens=context_tokens / batch if batch else input_tokens,
    )


def _arrivals_s(member: DecodeMember) -> npt.NDArray[np.float64]:
    known = _known.get(member)
    if known is None or known.scheduled != member.scheduled or known.unseen != member.unseen_requests:
        at_s = np.array([at_ns / NS_PER_S for at_ns in member.arrivals_ns()])
        known = _known[member] = _Arrivals(member.scheduled, member.unseen_requests, at_s)
    return known.at_s
