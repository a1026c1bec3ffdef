"""Promises of pool_load.py."""

import pytest

from kvstore.master.scheduling.instances import DecodeMember, Promise
from kvstore.master.scheduling.pool_load import DecodeDuration, pool_load
from tests.master.blocks import S
from tests.master.scheduling.reports import decode


def test_the_load_is_what_is_decoded_and_what_is_on_its_way() -> None:
    one, two = DecodeMember(decode("a", batch=3, context_tokens=300), 0), DecodeMember(decode("b", batch=1, context_tokens=500), 0)
    two.promise(1, Promise(9 * S, 12 * S, context_tokens=10))
    one.promise(2, Promise(7 * S, 12 * S, context_tokens=10))
    load = pool_load([one, two], decode_s=4.0, input_tokens=50, now_ns=6 * S)
    assert (load.now_s, load.decode_instances, load.decode_s, load.context_tokens) == (6.0, 2, 4.0, 200.0)
    assert (list(load.decode_begun_s), load.prefill_ends_s) == ([4.0] * 4, [7.0, 9.0])


def test_where_nothing_is_decoded_a_sequence_is_taken_to_be_like_this_prompt() -> None:
    load = pool_load([DecodeMember(decode(), 0)], decode_s=0.0, input_tokens=50, now_ns=0)
    assert (load.context_tokens, list(load.decode_begun_s)) == (50, [])


def test_the_duration_is_that_of_the_first_and_then_an_average_of_late() -> None:
    duration = DecodeDuration()
    assert duration.seconds == 0
    duration.add(10.0)
    assert duration.seconds == 10.0
    for _ in range(200):
        duration.add(20.0)
    assert duration.seconds == pytest.approx(20.0, rel=0.01)
