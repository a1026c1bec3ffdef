"""Promises of traceparent.py: what the standard's own example says, and that what is malformed is as nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.traceparent import TraceParent, is_sampled, parse_traceparent

EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_example_of_the_standard() -> None:
    assert parse_traceparent(EXAMPLE) == TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
    assert is_sampled(EXAMPLE) is True


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
def test_what_is_written_is_read(trace_id: int, span_id: int) -> None:
    parent = TraceParent(trace_id, span_id)
    assert parse_traceparent(parent.text()) == parent


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        EXAMPLE + "-more",
        EXAMPLE.upper(),
        EXAMPLE + "\n",
        EXAMPLE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        EXAMPLE.replace("00f067aa0ba902b7", "0" * 16),
        "ff" + EXAMPLE[2:],
        EXAMPLE[:-1] + "0",
    ],
)
def test_what_is_malformed_or_not_sampled_is_as_nothing(text: str) -> None:
    assert parse_traceparent(text) is None
    assert is_sampled(text) is (False if text == EXAMPLE[:-1] + "0" else None)


def test_later_versions_may_have_more_fields() -> None:
    assert parse_traceparent("01" + EXAMPLE[2:] + "-more") == parse_traceparent(EXAMPLE)
