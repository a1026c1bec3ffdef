"""A small queueing model of both pools under too many requests, to see what an admission does to their load. Deterministic by its seed."""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvstore.scheduler.admission import AdmissionPolicy, PoolLoad
from kvstore.scheduler.request import Slo

ARRIVALS_PER_S: Final = 20
PREFILL_SERVERS: Final = 75
PREFILL_S: Final = 5.0  # so the prefill pool does 15 a second
DECODE_S: Final = 10.0
ROOM: Final = 100  # sequences the decode pool may have within the SLO: so it does 10 a second
SLO: Final = Slo(ttft_s=10.0, tbt_s=float(ROOM))
CONTEXT_TOKENS: Final = 1000.0


class OneSecondEach:
    """TBT is the batch in seconds."""

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return float(batch)


@dataclass
class Course:
    """Counters and samples of a run; samples begin after WARM_UP_S."""

    accepted_per_s: list[int] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    prefilling: list[int] = field(default_factory=list)
    finished: int = 0
    rejected_at_arrival: int = 0
    rejected_after_prefill: int = 0


WARM_UP_S: Final = 40


def run(admission: AdmissionPolicy, *, seconds: int = 240, seed: int = 1) -> Course:
    """Requests at even intervals; prefills first come, first served; decoding takes between half and one and a half of DECODE_S."""
    rng, course = random.Random(seed), Course()
    free_at_s = [0.0] * PREFILL_SERVERS
    prefill_ends_s: deque[float] = deque()  # ascending: servers are alike
    decoding: list[tuple[float, float]] = []  # (end, begin)
    accepted = 0

    def load(now_s: float) -> PoolLoad:
        return PoolLoad(now_s, 1, sorted(begun for _, begun in decoding), list(prefill_ends_s), DECODE_S, CONTEXT_TOKENS)

    for tick in range(seconds * ARRIVALS_PER_S):
        now_s = tick / ARRIVALS_PER_S
        while decoding and decoding[0][0] <= now_s:
            heapq.heappop(decoding)
            course.finished += 1
        while prefill_ends_s and prefill_ends_s[0] <= now_s:
            prefill_ends_s.popleft()
            if admission.on_decode(load(now_s), SLO) is None:
                heapq.heappush(decoding, (now_s + DECODE_S * rng.uniform(0.5, 1.5), now_s))
            else:
                course.rejected_after_prefill += 1
        end_s = max(free_at_s[0], now_s) + PREFILL_S
        if admission.on_arrival(load(now_s), SLO, ttft_s=end_s - now_s) is None:
            heapq.heapreplace(free_at_s, end_s)
            prefill_ends_s.append(end_s)
            accepted += 1
        else:
            course.rejected_at_arrival += 1
        if (tick + 1) % ARRIVALS_PER_S == 0:
            if now_s >= WARM_UP_S:
                course.accepted_per_s.append(accepted)
                course.decoding.append(len(decoding))
                course.prefilling.append(len(prefill_ends_s))
            accepted = 0
    return course
