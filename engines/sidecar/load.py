"""Load of an engine, and whether it sleeps or was restarted, from its metrics in Prometheus' text form.

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
"""Part of PREFILL_S in which a request waited for its turn."""
PROMPTS: Final = "prompts"
PROMPT_TOKENS: Final = "prompt_tokens"
STARTED_S: Final = "started_s"
"""Absent where several processes share their metrics, as SGLang's always do."""
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
"""Samples that are added up over the ranks of an engine, by what they count."""
USED: Final = "vllm:kv_cache_usage_perc"
CACHE: Final = "vllm:cache_config_info"
SLEEP: Final = "vllm:engine_sleep_state"
"""One series a state, `awake` among them: 0 where the engine takes requests and computes none until it is woken up."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Of all data-parallel ranks of the engine together."""

    running: int
    waiting: int
    context_tokens: int
    """In its cache, for requests that run."""
    capacity_tokens: int
    """0: not told."""
    mean_prefill_s: float
    """Since it started; 0 before the first."""
    mean_prompt_tokens: float
    """Of requests that are over; 0 before the first."""
    prompts: int
    """Requests that are over."""
    started_s: float = 0.0
    """Seconds since 1970; 0: not told."""
    is_asleep: bool = False
    """Any of its ranks."""

    def is_restarted_since(self, before: "EngineLoad") -> bool:
        """Whether the engine was started again since `before`: by another start time, or a counter that fell."""
        return self.started_s != before.started_s or self.prompts < before.prompts

    @property
    def expected_tokens(self) -> int:
        """Of its cache, once what waits is in it, too: the engine does not tell how long those prompts are, so as others were."""
        return self.context_tokens + round(self.waiting * self.mean_prompt_tokens)

    @property
    def queue_s(self) -> float:
        """Until it could start on something new: what waits takes as long as others took."""
        return self.waiting * self.mean_prefill_s


def read_load(text: str) -> EngineLoad:
    """Raises ProtocolError: these are no metrics, or not those of an engine."""
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
        raise ProtocolError("the engine's metrics have values that are no finite numbers")
    if not {RUNNING, WAITING} <= sums.keys() and CAPACITY_TOKENS not in sums:
        raise ProtocolError(
            "the engine's metrics have no numbers of requests that run and wait: is it vLLM, with its statistics on, or SGLang with"
            " --enable-metrics?"
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
    """Whether the sample is of one priority, which SGLang adds to the one of all."""
    return bool(sample.labels.get("priority"))


def _mean(sums: Mapping[str, float], total: str, count: str) -> float:
    return sums.get(total, 0.0) / sums[count] if sums.get(count) else 0.0


def _capacity_tokens(labels: Mapping[str, str]) -> int:
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
