"""Helpers of the simulator's tests: a model whose times can be added up by hand, and short ways to make requests and jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.simulator.job import SimulatedJob
from kvstore.lab.simulator.plan import InstanceModel
from kvstore.lab.simulator.prefill import LocalCache
from kvstore.scheduler.prefix_index import PrefixIndex
from kvstore.scheduler.request import ScheduleRequest
from kvstore.tiers.policies.lru import LRU


@dataclass(frozen=True)
class RoundTimes:
    """A token of a prompt takes 1/1024 s, a decode step 1/16 s and 1/64 s more a sequence: sums of these are exact in binary."""

    context_s: float = 0.0
    """More a step, for each token of context."""

    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return (input_tokens - prefix_tokens) / 1024

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return 1 / 16 + batch / 64 + context_tokens * self.context_s

    def step_s(self, *, new_tokens: int, prefix_tokens: int, batch: int, context_tokens: int) -> float:
        return new_tokens / 1024 + (self.tbt_s(batch, context_tokens) - 1 / 16 if batch else 0.0)

    def prefill_flops(self, input_tokens: int, prefix_tokens: int) -> float:
        return 1000.0 * (input_tokens - prefix_tokens)

    def decode_flops(self, batch: int, context_tokens: int) -> float:
        return 10.0 * batch + context_tokens


def machine(**changed: Any) -> InstanceModel:
    """4 layers, 1024 bytes of KV cache a token, which 1 MiB/s sends in 1/1024 s and 16 MiB/s loads in 1/16384 s."""
    facts: dict[str, Any] = {
        "times": RoundTimes(),
        "layers": 4,
        "kv_bytes_per_token": 1024,
        "capacity_tokens": 1_000_000,
        "peak_flops_per_s": 1e7,
        "send_bytes_per_s": float(1 << 20),
        "load_bytes_per_s": float(16 << 20),
    }
    return InstanceModel(**(facts | changed))


def job(number: int = 0, *, keys: Sequence[int] = (), tokens: int = 1024, output: int = 1, expected_s: float = 0.0) -> SimulatedJob:
    """A request of `tokens` that came at 0 and makes `output` tokens."""
    found = SimulatedJob(number, ScheduleRequest(keys, tokens, 512, output), 0.0, output)
    found.expected_prefill_s = expected_s
    return found


def cache(blocks: int = 100, *, index: PrefixIndex[Any] | None = None, number: int = 0) -> LocalCache:
    return LocalCache(number, blocks, LRU(), PrefixIndex() if index is None else index)


def asked(at_ms: float, keys: Sequence[int], *, output: int = 1, tokens: int | None = None) -> TraceRequest:
    """A line of a trace; its prompt fills its blocks unless `tokens` says otherwise."""
    return TraceRequest(at_ms, 512 * len(keys) if tokens is None else tokens, output, tuple(keys))
