"""How busy an engine is, read off the metrics that it serves in Prometheus' text form.

Source: vLLM 0.32, v1/metrics/loggers.py, for the names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from kvstore.protocol.errors import ProtocolError

RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
USED: Final = "vllm:kv_cache_usage_perc"
CACHE: Final = "vllm:cache_config_info"
PREFILLS: Final = "vllm:request_prefill_time_seconds_count"
PREFILL_S: Final = "vllm:request_prefill_time_seconds_sum"
PROMPTS: Final = "vllm:request_prompt_tokens_count"
PROMPT_TOKENS: Final = "vllm:request_prompt_tokens_sum"


@dataclass(frozen=True, slots=True)
class Load:
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

    @property
    def expected_tokens(self) -> int:
        """Of its cache, once what waits is in it, too: the engine does not tell how long those prompts are, so as others were."""
        return self.context_tokens + round(self.waiting * self.mean_prompt_tokens)

    @property
    def queue_s(self) -> float:
        """Until it could start on something new: what waits takes as long as others took."""
        return self.waiting * self.mean_prefill_s


def read_load(text: str) -> Load:
    """Raises ProtocolError: these are no metrics, or not those of an engine."""
    sums: dict[str, float] = {}
    capacity_tokens, used, engines = 0, 0.0, 0
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == CACHE:
                    capacity_tokens += _capacity_tokens(sample.labels)
                elif sample.name == USED:
                    used, engines = used + sample.value, engines + 1
                elif sample.name in (RUNNING, WAITING, PREFILLS, PREFILL_S, PROMPTS, PROMPT_TOKENS):
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise ProtocolError(f"the engine's metrics cannot be read: {error}") from None
    if not all(map(isfinite, (used, *sums.values()))):
        raise ProtocolError("the engine's metrics have values that are no finite numbers")
    if RUNNING not in sums or WAITING not in sums:
        raise ProtocolError(f"the engine's metrics have no {RUNNING} and {WAITING}: is it vLLM, with its statistics on?")
    return Load(
        running=round(sums[RUNNING]),
        waiting=round(sums[WAITING]),
        context_tokens=round(used / max(engines, 1) * capacity_tokens),
        capacity_tokens=capacity_tokens,
        mean_prefill_s=_mean(sums, PREFILL_S, PREFILLS),
        mean_prompt_tokens=_mean(sums, PROMPT_TOKENS, PROMPTS),
    )


def _mean(sums: Mapping[str, float], total: str, count: str) -> float:
    return sums.get(total, 0.0) / sums[count] if sums.get(count) else 0.0


def _capacity_tokens(labels: Mapping[str, str]) -> int:
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
