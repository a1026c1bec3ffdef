"""The load of both pools as the master can know it, for early rejection (scheduler/admission.py): a decision reads anew only the instances
to which or from which something came since the one before.

Instances report how many sequences they decode, not since when. So each is taken to be half through: who asks when the next one ends
(`predicted_uniform`) cannot be used live, who only counts them can.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np

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
        prefill_ends_s=np.concatenate([member.arrivals_s() for member in members]),
        decode_s=decode_s,
        context_tokens=context_tokens / batch if batch else input_tokens,
    )
