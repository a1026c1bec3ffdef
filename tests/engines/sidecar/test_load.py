"""Promises of load.py, on metrics as vLLM 0.32 serves them."""

import pytest

from kvstore.engines.sidecar.load import EngineLoad, read_load
from kvstore.protocol.errors import ProtocolError

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1.0
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 2.0
vllm:request_prefill_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 2.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 0.5
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="m"} 1.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 1.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 501.0
vllm:request_prompt_tokens_count{engine="1",model_name="m"} 3.0
vllm:request_prompt_tokens_sum{engine="1",model_name="m"} 1500.0
"""


def test_the_ranks_of_an_engine_are_one_load() -> None:
    load = read_load(METRICS)
    assert load == EngineLoad(
        running=4, waiting=4, context_tokens=1200, capacity_tokens=3200, mean_prefill_s=0.25, mean_prompt_tokens=500.25, prompts=4
    )
    assert load.queue_s == 1.0
    assert load.expected_tokens == 1200 + 4 * 500.25, "prompts that wait count as the tokens that others had"


def test_an_engine_that_has_done_nothing_has_no_queue() -> None:
    load = read_load('vllm:num_requests_running 0\nvllm:num_requests_waiting 2\nvllm:cache_config_info{block_size="None"} 1\n')
    assert load == EngineLoad(0, 2, 0, 0, 0.0, 0.0, 0)
    assert (load.queue_s, load.expected_tokens) == (0, 0)


SGLANG = """# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{dp_rank="0"} 4096.0
"""
SGLANG_BUSY = (
    SGLANG
    + """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",priority=""} 3.0
sglang:num_running_reqs{dp_rank="0",priority="1"} 2.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{dp_rank="0",priority=""} 2.0
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{dp_rank="0"} 1000.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{is_streaming="false",le="+Inf"} 4.0
sglang:time_to_first_token_seconds_count{is_streaming="false"} 4.0
sglang:time_to_first_token_seconds_sum{is_streaming="false"} 3.0
# TYPE sglang:queue_time_seconds histogram
sglang:queue_time_seconds_bucket{le="+Inf"} 4.0
sglang:queue_time_seconds_count 4.0
sglang:queue_time_seconds_sum 1.0
# TYPE sglang:prompt_tokens counter
sglang:prompt_tokens_total{is_streaming="false"} 800.0
# TYPE sglang:num_requests counter
sglang:num_requests_total{is_streaming="false"} 4.0
"""
)


def test_load_of_sglang_is_read() -> None:
    """The time of a prefill excludes the time in the queue; the total already includes the share of a priority."""
    load = read_load(SGLANG_BUSY)
    assert load == EngineLoad(3, 2, context_tokens=1000, capacity_tokens=4096, mean_prefill_s=0.5, mean_prompt_tokens=200.0, prompts=4)
    assert load.queue_s == 1.0


def test_sglang_before_its_first_request_is_idle() -> None:
    """It has no numbers of requests until then, and gets no request before it is known to be idle."""
    assert read_load(SGLANG) == EngineLoad(0, 0, 0, 4096, 0.0, 0.0, 0)


SLEEP_STATES = """vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0
vllm:engine_sleep_state{engine="1",sleep_state="awake"} AWAKE
"""


@pytest.mark.parametrize(("awake", "is_asleep"), [("1.0", False), ("0.0", True)])
def test_engine_with_a_sleeping_rank_is_asleep(awake: str, is_asleep: bool) -> None:
    assert read_load(METRICS + SLEEP_STATES.replace("AWAKE", awake)).is_asleep is is_asleep


def test_restart_shows_in_the_start_time_or_a_counter() -> None:
    before = read_load(METRICS + "process_start_time_seconds 1000.5\n")
    assert before.started_s == 1000.5
    assert not before.is_restarted_since(before)
    assert read_load(METRICS + "process_start_time_seconds 1000.75\n").is_restarted_since(before)
    assert read_load(METRICS.replace('_count{engine="1",model_name="m"} 3.0', "_count 2.0")).is_restarted_since(read_load(METRICS))


@pytest.mark.parametrize("text", ["", "up 1\n", "vllm:num_requests_running 1\n", "vllm:num_requests_waiting 1\n"])
def test_metrics_of_something_else_say_what_is_missing(text: str) -> None:
    with pytest.raises(ProtocolError, match="start vLLM with its statistics on"):
        read_load(text)


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
@pytest.mark.parametrize(
    "sample", ['running{engine="1"} 1.0', 'perc{engine="1"} 0.25', 'seconds_sum{engine="0"} 0.5', 'tokens_sum{engine="0"} 501.0']
)
def test_a_metric_that_is_no_finite_number_is_refused(sample: str, value: str) -> None:
    metrics = METRICS.replace(',model_name="m"', "")
    assert sample in metrics
    with pytest.raises(ProtocolError, match="are not finite"):
        read_load(metrics.replace(sample, f"{sample.split()[0]} {value}"))


def test_what_are_no_metrics_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_load("<html>{")
