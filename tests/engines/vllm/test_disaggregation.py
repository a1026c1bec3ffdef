"""Tokens that a prefill engine promises for a prompt, and the decode engine's wait for its blocks."""

import itertools
from typing import Any

import pytest

from kvstore.engines.vllm.disaggregation import POLL_GROWTH, POLL_S, Disaggregation
from tests.engines.vllm.requests import BLOCK_TOKENS, FakeRequest

WAIT_S = 2.0
FULL = 3 * BLOCK_TOKENS
"""Tokens of the full blocks of a prompt that is a little longer."""


def passing(*, saves: bool = True) -> Disaggregation:
    return Disaggregation(BLOCK_TOKENS, wait_s=WAIT_S, saves=saves)


def to_decode(name: str = "d", tokens: Any = FULL, prompt: int = FULL + 2) -> FakeRequest:
    return FakeRequest(name, prompt, kv_transfer_params={"do_remote_prefill": True, "kvstore_tokens": tokens})


def to_prefill(prompt: int = FULL + 2, **state: Any) -> FakeRequest:
    return FakeRequest("p", prompt, kv_transfer_params={"do_remote_decode": True, "request_id": 7}, **state)


def test_decode_engine_waits_for_tokens_of_the_prefill_engine() -> None:
    prefill, decode = passing(), passing()
    told = prefill.finished(to_prefill(FULL + 3, num_computed_tokens=FULL + 2))
    assert told == {"do_remote_prefill": True, "do_remote_decode": False, "kvstore_tokens": FULL}
    request = FakeRequest("d", FULL + 3, kv_transfer_params=told | {"request_id": 7})
    assert decode.waits(request, FULL - BLOCK_TOKENS, 10.0, is_answered=True)
    assert decode.is_waiting
    assert not decode.waits(request, FULL, 10.1, is_answered=True)
    assert not decode.is_waiting


def test_what_a_step_under_way_computes_is_not_promised() -> None:
    told = passing().finished(to_prefill(num_computed_tokens=FULL, num_in_flight_tokens=1))
    assert told is not None
    assert told["kvstore_tokens"] == FULL - BLOCK_TOKENS


def test_an_engine_that_stores_nothing_has_nobody_wait() -> None:
    told = passing(saves=False).finished(to_prefill(num_computed_tokens=FULL))
    assert told == passing().finished(to_prefill(num_computed_tokens=FULL), is_shared=False)
    assert told is not None
    assert told["kvstore_tokens"] == 0
    assert not passing().waits(to_decode(tokens=0), 0, 0.0, is_answered=True)


def test_the_wait_ends_with_its_time_and_does_not_begin_again() -> None:
    decode, request = passing(), to_decode()
    assert decode.waits(request, 0, 10.0, is_answered=True)
    assert decode.waits(request, 0, 10.0 + WAIT_S - 0.001, is_answered=True)
    assert not decode.waits(request, 0, 10.0 + WAIT_S, is_answered=True)
    assert not decode.waits(request, 0, 10.0, is_answered=True), "it was preempted"
    decode.finished(request)
    assert decode.waits(request, 0, 20.0, is_answered=True), "another one of that name"


def test_what_was_there_once_and_is_lost_is_not_waited_for() -> None:
    decode, request = passing(), to_decode()
    assert not decode.waits(request, FULL, 10.0, is_answered=True)
    assert not decode.waits(request, 0, 10.1, is_answered=True)


def test_a_store_that_is_away_is_not_waited_for() -> None:
    decode, request = passing(), to_decode()
    assert decode.waits(request, 0, 10.0, is_answered=True)
    assert not decode.waits(request, 0, 10.1, is_answered=False)
    assert not decode.waits(request, 0, 10.2, is_answered=True)


def test_lookups_of_a_waiting_request_get_rarer() -> None:
    """The first follow one another by POLL_S, later ones by a share of the time waited; calls in between change nothing."""
    decode, request = passing(), to_decode()
    times, now_s = [], 10.0
    while decode.waits(request, 0, now_s, is_answered=True):
        times.append(now_s)
        assert decode.waits(request, 0, now_s + POLL_S / 2, is_answered=True)
        now_s = decode.next_lookup_s(request)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[0] == pytest.approx(POLL_S)
    assert all(gap == pytest.approx(max(POLL_S, (at - 10.0) * POLL_GROWTH)) for at, gap in zip(times, gaps, strict=False))
    assert len(times) < 30


@pytest.mark.parametrize("tokens", [None, "12", 12.0, [], -5, 0])
def test_nonsense_of_a_client_is_no_reason_to_wait(tokens: Any) -> None:
    assert not passing().waits(to_decode(tokens=tokens), 0, 0.0, is_answered=True)


def test_wait_ignores_tokens_beyond_the_prompt() -> None:
    """A token at least it computes itself."""
    request = to_decode(tokens=10**30, prompt=FULL)
    decode = passing()
    assert decode.waits(request, FULL - 2 * BLOCK_TOKENS, 0.0, is_answered=True)
    assert not decode.waits(request, FULL - BLOCK_TOKENS, 0.0, is_answered=True)


@pytest.mark.parametrize("params", [None, {}, {"request_id": 7, "prefix_blocks": 3}, {"do_remote_prefill": False, "kvstore_tokens": FULL}])
def test_requests_of_one_engine_neither_wait_nor_say_anything(params: dict[str, Any] | None) -> None:
    request = FakeRequest("one", FULL + 2, num_computed_tokens=FULL + 2, kv_transfer_params=params)
    assert not passing().waits(request, 0, 0.0, is_answered=True)
    assert passing().finished(request) is None
