"""Tests of pool_load.py."""

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.scheduling.instances import DecodeMember, PromisedWork
from kvstore.master.scheduling.pool_load import DecodeDuration, pool_load
from kvstore.scheduler.admission import PoolLoad, expected_decoding, make_admission
from kvstore.scheduler.request import Slo
from tests.master.blocks import S
from tests.master.scheduling.reports import decode


def test_the_load_is_what_is_decoded_and_what_is_on_its_way() -> None:
    one, two = DecodeMember(decode("a", batch=3, context_tokens=300), 0), DecodeMember(decode("b", batch=1, context_tokens=500), 0)
    two.promise(1, PromisedWork(9 * S, 12 * S, context_tokens=10))
    one.promise(2, PromisedWork(7 * S, 12 * S, context_tokens=10))
    load = pool_load([one, two], decode_s=4.0, input_tokens=50, now_ns=6 * S)
    assert (load.now_s, load.decode_instances, load.decode_s, load.context_tokens) == (6.0, 2, 4.0, 200.0)
    assert (list(load.decode_begun_s), sorted(load.prefill_ends_s)) == ([4.0] * 4, [7.0, 9.0])


def test_idle_pool_assumes_this_prompts_context() -> None:
    load = pool_load([DecodeMember(decode(), 0)], decode_s=0.0, input_tokens=50, now_ns=0)
    assert (load.context_tokens, list(load.decode_begun_s)) == (50, [])


class Listed(DecodeMember):
    """Counts how often its promises are gone through."""

    times = 0

    def _compute_arrivals_s(self) -> list[float]:
        self.times += 1
        return super()._compute_arrivals_s()


def test_pool_load_recomputes_only_changed_promises() -> None:
    members = [Listed(decode(name), 0) for name in "abc"]
    for number, member in enumerate(members):
        member.promise(number, PromisedWork(9 * S, 12 * S))

    def listed() -> list[int]:
        pool_load(members, decode_s=4.0, input_tokens=50, now_ns=6 * S)
        return [member.times for member in members]

    assert listed() == listed() == [1, 1, 1]
    members[1].promise(7, PromisedWork(9 * S, 12 * S))
    members[2].renew(decode("c"), [2], 6 * S)
    assert listed() == listed() == [1, 2, 2]


def test_sequences_that_are_decoded_take_no_memory_each() -> None:
    member = DecodeMember(decode(batch=10_000_000), 0)
    tracemalloc.start()
    try:
        load = pool_load([member], decode_s=4.0, input_tokens=50, now_ns=6 * S)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(load.decode_begun_s), load.decode_begun_s[-1]) == (10_000_000, 4.0)
    assert peak_bytes < 1_000_000


class BatchInSeconds:
    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return float(batch)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("promise"), st.integers(0, 1), st.integers(0, 40)),
        st.tuples(st.just("seen"), st.integers(0, 1), st.integers(0, 20)),
        st.tuples(st.just("seen after"), st.integers(0, 1), st.integers(1, 40)),
        st.tuples(st.just("wait"), st.just(0), st.integers(1, 8)),
    ),
    max_size=20,
)


@given(steps=STEPS, batch=st.integers(0, 5), decode_s=st.sampled_from([0.0, 0.7, 4.0]), ttft_s=st.integers(0, 24).map(lambda n: n / 4))
def test_cached_pool_load_equals_a_full_computation(steps: list[tuple[str, int, int]], batch: int, decode_s: float, ttft_s: float) -> None:
    """Times are quarters of a second."""
    members = [DecodeMember(decode(name, batch=batch, context_tokens=10), 0) for name in "ab"]
    now_ns = 0
    for number, (step, which, value) in enumerate(steps):
        match step:
            case "promise":
                at_ns = now_ns + value * S // 4
                members[which].promise(number, PromisedWork(at_ns, at_ns + 3 * S))
            case "seen":
                members[which].renew(decode("ab"[which], batch=batch, context_tokens=10), [value], now_ns)
            case "seen after":
                members[which].renew(decode("ab"[which], batch=batch, context_tokens=10, seen_after_s=value / 4), [], now_ns)
            case _:
                now_ns += value * S // 4
        for member in members:
            member.forget_lost(now_ns)
        load = pool_load(members, decode_s=decode_s, input_tokens=10, now_ns=now_ns)
        now_s = now_ns / S
        begun_s = [now_s - decode_s / 2] * (2 * batch)
        ends_s = sorted(at_s for member in members for at_s in member._compute_arrivals_s())
        plain = PoolLoad(now_s, 2, begun_s, ends_s, decode_s, load.context_tokens)
        at_s = now_s + ttft_s
        staying = 2 * batch * math.exp(-ttft_s / (decode_s or math.inf))
        coming = sum(math.exp((end_s - at_s) / (decode_s or math.inf)) for end_s in ends_s if end_s <= at_s)
        assert expected_decoding(at_s, load) == pytest.approx(staying + coming)
        for name in ("early", "predicted", "predicted_uniform"):
            admission = make_admission(name, BatchInSeconds())
            assert admission.on_arrival(load, Slo(10, 3), ttft_s=ttft_s) == admission.on_arrival(plain, Slo(10, 3), ttft_s=ttft_s)


def test_decode_duration_is_first_then_averaged() -> None:
    duration = DecodeDuration()
    assert duration.seconds == 0
    duration.add(10.0)
    assert duration.seconds == 10.0
    for _ in range(200):
        duration.add(20.0)
    assert duration.seconds == pytest.approx(20.0, rel=0.01)
