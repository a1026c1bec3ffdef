"""Load of the prefill and decode pools, for early rejection (scheduler/admission.py). A decision recomputes only
instances whose requests have changed.

Instances report how many sequences they decode, but not since when; each is assumed to be half done. So
`predicted_uniform`, which needs the end of the next sequence, cannot be used live."""

from collections.abc import Iterable
from typing import Final

import numpy as np

from kvstore.master.scheduling.instances import NS_PER_S, DecodeMember
from kvstore.scheduler.admission import PoolLoad

SMOOTHING: Final = 0.05
"""Weight of the latest request in the average decode duration: about twenty requests count."""


class DecodeDuration:
    """Moving average of the predicted decode durations; 0 while unknown."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Add a request's duration."""
        self.seconds += (seconds - self.seconds) * (SMOOTHING if self.seconds else 1.0)


def pool_load(decode: Iterable[DecodeMember], *, decode_s: float, input_tokens: int, now_ns: int) -> PoolLoad:
    """Return the load now. `decode_s` is the duration of a sequence; `input_tokens` the context of a sequence if none
    is decoded.

    O(instances, and changed promises), and a copy of 8 bytes for each promise."""
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
