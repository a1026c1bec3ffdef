"""Outcome of a strategy under a load that exceeds the KV cache: latencies, errors, recomputation, goodput.

server.py models the steps, load.py the users, strategies.py the strategies.
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
    """Mean and 99th percentile of durations, in seconds; 0 without any. Computed from all durations, unlike DurationSummary."""

    mean_s: float
    p99_s: float

    @classmethod
    def of(cls, durations_s: Iterable[float]) -> "MeanAndTail":
        """p99 is the smallest duration that at least 99 % do not exceed."""
        ordered = sorted(durations_s)
        if not ordered:
            return cls(0.0, 0.0)
        return cls(sum(ordered) / len(ordered), ordered[-(-99 * len(ordered) // 100) - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """Result of one strategy under one load. Latencies are of completed requests."""

    strategy: str
    users: int
    requests: int
    completed: int
    rejected: int
    evicted: int
    """Ended with an error in the middle of their responses."""
    wait: MeanAndTail
    """From arrival to the start of the first prefill."""
    ttft: MeanAndTail
    latency: MeanAndTail
    """From arrival to the last token."""
    displacements: int
    prefilled_tokens: int
    recomputed_tokens: int
    """Prefilled tokens that had been computed before."""
    recompute_share: float
    """Share of the prefill time spent on displaced requests."""
    offloaded_bytes: int
    fetched_bytes: int
    copying_s: float
    """Time of copies between tiers."""
    duration_s: float
    """Until the last request ended."""
    goodput_tokens_per_s: float
    """Tokens of complete responses over the duration."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for --json."""
        return asdict(self)


def simulate_load(server: ServingModel, strategy: Strategy, load: UserLoad, rng: Random) -> LoadOutcome:
    """Serve the load to its end. Deterministic in its arguments, `rng`'s state included.

    With equal `rng` every strategy gets the same requests, though at other times.
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
