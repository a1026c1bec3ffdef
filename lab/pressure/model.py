"""What each strategy makes of users whose caches do not all fit: latencies, errors, work done twice, goodput. A model; it serves nobody.

The steps are server.py's, the users load.py's, the strategies strategies.py's.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from kvstore.lab.pressure.load import FinishReason, Generation, UserLoad, Users
from kvstore.lab.pressure.server import PressedServer, ServerWork
from kvstore.lab.pressure.strategies import ServingModel, Strategy


@dataclass(frozen=True, slots=True)
class MeanAndTail:
    """Of durations, in seconds; 0 where there are none. One that keeps every duration: the simulator's Spread counts them by length."""

    mean_s: float
    p99_s: float

    @classmethod
    def of(cls, durations_s: Iterable[float]) -> "MeanAndTail":
        """p99: the shortest that at least 99 % are not above."""
        ordered = sorted(durations_s)
        if not ordered:
            return cls(0.0, 0.0)
        return cls(sum(ordered) / len(ordered), ordered[-(-99 * len(ordered) // 100) - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """Of one strategy under one load. Latencies are of completed requests."""

    strategy: str
    users: int
    requests: int
    completed: int
    rejected: int
    evicted: int
    """Ended with an error in the middle of their answers."""
    wait: MeanAndTail
    """From arrival until its first prefill begins."""
    ttft: MeanAndTail
    latency: MeanAndTail
    """From arrival to the last token."""
    displacements: int
    prefilled_tokens: int
    recomputed_tokens: int
    """Of these, those computed before."""
    recompute_share: float
    """Of the time spent on prefill, what went to requests that had been displaced."""
    offloaded_bytes: int
    fetched_bytes: int
    copying_s: float
    """Spent on copies between tiers."""
    duration_s: float
    """Until the last request ended."""
    goodput_tokens_per_s: float
    """Tokens of complete answers over the duration."""

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def relieve(server: ServingModel, strategy: Strategy, load: UserLoad, rng: Random) -> LoadOutcome:
    """Serve the load to its end. Equal arguments, `rng` included, give an equal outcome; and one of equal state asks the same of every
    strategy, though not at the same times.
    """
    pressed = PressedServer(server, strategy, Users(load, rng))
    while pressed.step():
        pass
    return _outcome(strategy, load, pressed.ended, pressed.work)


def _outcome(strategy: Strategy, load: UserLoad, ended: Sequence[Generation], work: ServerWork) -> LoadOutcome:
    expirations = Counter(request.ending for request in ended)
    done = [request for request in ended if request.ending is FinishReason.COMPLETED]
    duration_s = max((request.ended_s for request in ended), default=0.0)
    return LoadOutcome(
        strategy=strategy.name,
        users=load.users,
        requests=len(ended),
        completed=len(done),
        rejected=expirations[FinishReason.REJECTED],
        evicted=expirations[FinishReason.EVICTED],
        wait=MeanAndTail.of(request.wait_s for request in done),
        ttft=MeanAndTail.of(request.ttft_s for request in done),
        latency=MeanAndTail.of(request.ended_s - request.arrival_s for request in done),
        displacements=work.displacements,
        prefilled_tokens=work.prefilled_tokens,
        recomputed_tokens=work.recomputed_tokens,
        recompute_share=work.recompute_s / work.prefill_s if work.prefill_s else 0.0,
        offloaded_bytes=work.offloaded_bytes,
        fetched_bytes=work.fetched_bytes,
        copying_s=work.copying_s,
        duration_s=duration_s,
        goodput_tokens_per_s=sum(request.output_tokens for request in done) / duration_s if duration_s else 0.0,
    )
