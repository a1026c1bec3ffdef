"""Load of an engine, and whether it sleeps or restarted, from its Prometheus metrics.

Source: vLLM 0.32, v1/metrics/loggers.py, and SGLang 0.5.23, srt/observability/metrics_collector.py, for the names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvstore.protocol.errors import ProtocolError

RUNNING: Final = "running"
WAITING: Final = "waiting"
USED_TOKENS: Final = "used_tokens"
CAPACITY_TOKENS: Final = "capacity_tokens"
PREFILLS: Final = "prefills"
PREFILL_S: Final = "prefill_s"
QUEUED_S: Final = "queued_s"
"""Part of PREFILL_S that requests waited in the queue."""
PROMPTS: Final = "prompts"
PROMPT_TOKENS: Final = "prompt_tokens"
STARTED_S: Final = "started_s"
"""Absent if several processes share their metrics, as always in SGLang."""
SUMS: Final = {
    "process_start_time_seconds": STARTED_S,
    "vllm:num_requests_running": RUNNING,
    "vllm:num_requests_waiting": WAITING,
    "vllm:request_prefill_time_seconds_count": PREFILLS,
    "vllm:request_prefill_time_seconds_sum": PREFILL_S,
    "vllm:request_prompt_tokens_count": PROMPTS,
    "vllm:request_prompt_tokens_sum": PROMPT_TOKENS,
    "sglang:num_running_reqs": RUNNING,
    "sglang:num_queue_reqs": WAITING,
    "sglang:num_used_tokens": USED_TOKENS,
    "sglang:max_total_num_tokens": CAPACITY_TOKENS,
    "sglang:time_to_first_token_seconds_count": PREFILLS,
    "sglang:time_to_first_token_seconds_sum": PREFILL_S,
    "sglang:queue_time_seconds_sum": QUEUED_S,
    "sglang:num_requests_total": PROMPTS,
    "sglang:prompt_tokens_total": PROMPT_TOKENS,
}
"""Samples that are summed over an engine's ranks, by meaning."""
USED: Final = "vllm:kv_cache_usage_perc"
CACHE: Final = "vllm:cache_config_info"
SLEEP: Final = "vllm:engine_sleep_state"
"""One series per state. `awake` is 0 while the engine accepts requests without computing them."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine, summed over its data-parallel ranks."""

    running: int
    waiting: int
    context_tokens: int
    """Tokens in the cache for running requests."""
    capacity_tokens: int
    """0: unknown."""
    mean_prefill_s: float
    """Since the engine started; 0 before the first prefill."""
    mean_prompt_tokens: float
    """Of finished requests; 0 before the first."""
    prompts: int
    """Finished requests."""
    started_s: float = 0.0
    """Unix time in seconds; 0: unknown."""
    is_asleep: bool = False
    """True if any rank sleeps."""

    def is_restarted_since(self, before: "EngineLoad") -> bool:
        """Return whether the engine restarted after `before`: its start time differs or a counter fell."""
        return self.started_s != before.started_s or self.prompts < before.prompts

    @property
    def expected_tokens(self) -> int:
        """Tokens in the cache once waiting requests have been admitted, estimated with the mean prompt length."""
        return self.context_tokens + round(self.waiting * self.mean_prompt_tokens)

    @property
    def queue_s(self) -> float:
        """Estimated time until the engine can start a new request, with the mean prefill time."""
        return self.waiting * self.mean_prefill_s


def read_load(text: str) -> EngineLoad:
    """Parse an engine's metrics. Raises ProtocolError: not metrics, or not those of vLLM or SGLang."""
    sums: dict[str, float] = {}
    cached_tokens, used, engines, is_asleep = 0, 0.0, 0, False
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == CACHE:
                    cached_tokens += _capacity_tokens(sample.labels)
                elif sample.name == USED:
                    used, engines = used + sample.value, engines + 1
                elif sample.name == SLEEP:
                    is_asleep |= sample.labels.get("sleep_state") == "awake" and not sample.value
                elif (counted := SUMS.get(sample.name)) and not _is_share(sample):
                    sums[counted] = sums.get(counted, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise ProtocolError(f"the engine's metrics cannot be read: {error}") from None
    if not all(map(isfinite, (used, *sums.values()))):
        raise ProtocolError("the engine's metrics have values that are not finite")
    if not {RUNNING, WAITING} <= sums.keys() and CAPACITY_TOKENS not in sums:
        raise ProtocolError(
            "the engine's metrics have no counts of running and waiting requests: start vLLM with its statistics on, or SGLang with"
            " --enable-metrics"
        )
    sums[PREFILL_S] = max(0.0, sums.get(PREFILL_S, 0.0) - sums.get(QUEUED_S, 0.0))
    return EngineLoad(
        running=round(sums.get(RUNNING, 0.0)),
        waiting=round(sums.get(WAITING, 0.0)),
        context_tokens=round(sums.get(USED_TOKENS, used / max(engines, 1) * cached_tokens)),
        capacity_tokens=round(sums.get(CAPACITY_TOKENS, cached_tokens)),
        mean_prefill_s=_mean(sums, PREFILL_S, PREFILLS),
        mean_prompt_tokens=_mean(sums, PROMPT_TOKENS, PROMPTS),
        prompts=round(sums.get(PROMPTS, 0.0)),
        started_s=sums.get(STARTED_S, 0.0),
        is_asleep=is_asleep,
    )


def _is_share(sample: Sample) -> bool:
    """Return whether the sample is of one priority; SGLang adds those to the total."""
    return bool(sample.labels.get("priority"))


def _mean(sums: Mapping[str, float], total: str, count: str) -> float:
    return sums.get(total, 0.0) / sums[count] if sums.get(count) else 0.0


def _capacity_tokens(labels: Mapping[str, str]) -> int:
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
