"""Block ids as they would come to a policy: spread evenly, as a node's keys are, which are hashes. Traces number their blocks in a row.

A policy that hashes its keys (W-TinyLFU's sketch) has fewer collisions among consecutive numbers than it ever has in a node.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.traces.mooncake import TraceRequest

STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests with other ids: equal where they were equal, different where they were different.

    Source: the finalizer of SplitMix64, in Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    ids: NDArray[np.uint64] = np.fromiter(chain.from_iterable(request.hash_ids for request in requests), dtype=np.uint64)
    for shift, factor in STEPS:
        ids = (ids ^ (ids >> np.uint64(shift))) * np.uint64(factor)
    ids ^= ids >> np.uint64(31)
    found = iter(ids.tolist())
    return [
        TraceRequest(request.timestamp_ms, request.input_length, request.output_length, tuple(next(found) for _ in request.hash_ids))
        for request in requests
    ]
