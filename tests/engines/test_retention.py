"""Retention hints of requests: which are taken, and for which blocks."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engines.retention import MAX_RANGES, NO_HINT, RequestRetention, RetentionReader, parse_retention
from kvstore.protocol.retention import DEFAULT_PRIORITY, MAX_RETENTION_S, PRIORITIES, Retention

LOG = logging.getLogger("kvstore.tests")
BLOCK_TOKENS = 4
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@dataclass
class Settings:
    retention_from_requests: bool = True
    retention_ceiling: int = 75


def taken(ceiling: int = PRIORITIES, **hints: Any) -> RequestRetention:
    """Return well-formed hints."""
    found, problems = parse_retention(hints, ceiling)
    assert found is not None
    assert problems == []
    return found


def of_blocks(hints: RequestRetention, count: int) -> list[int]:
    """Return the priority of each block."""
    found = [hints.of_block(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS) for block in range(count)]
    return [DEFAULT_PRIORITY if hint is None else hint.priority for hint in found]


def test_hints_apply_to_all_blocks() -> None:
    hints = taken(priority=70, ttl_s=60, session="a", reuse_s=30)
    assert {hints.of_block(start, start + 4) for start in (0, 4, 1000)} == {Retention(70, 60.0, "a", 30.0)}
    assert hints.of_unknown == Retention(70, 60.0, "a", 30.0)


def test_high_range_counts_for_blocks_covered_in_part() -> None:
    assert of_blocks(taken(ranges=[[2, 9, 80]]), 4) == [80, 80, 80, 50]


def test_low_range_counts_for_whole_blocks_only() -> None:
    assert of_blocks(taken(ranges=[[2, 9, 20]]), 4) == [50, 20, 50, 50]


def test_open_range_reaches_the_end() -> None:
    assert of_blocks(taken(priority=60, ranges=[[8, None, 10]]), 4) == [60, 60, 10, 10]


def test_highest_of_overlapping_ranges_counts() -> None:
    assert of_blocks(taken(priority=0, ranges=[[0, 12, 30], [4, 8, 90], [0, 16, 20]]), 5) == [30, 90, 30, 20, 0]


def test_blocks_outside_of_ranges_have_no_hint() -> None:
    hints = taken(ttl_s=10, ranges=[[0, 4, 80]])
    assert hints.of_block(0, 4) == Retention(80, 10.0)
    assert hints.of_block(4, 8) is None


def test_unknown_blocks_have_the_hint_outside_of_ranges() -> None:
    assert taken(session="a", ranges=[[0, None, 80]]).of_unknown == Retention(session="a")
    assert taken(ranges=[[0, 4, 80]]).of_unknown is None


def test_session_and_reuse_are_of_all_blocks() -> None:
    hints = taken(session="a", reuse_s=5, ttl_s=10, ranges=[[0, 4, 80]])
    assert hints.of_block(0, 4) == Retention(80, 10.0, "a", 5.0)
    assert hints.of_block(4, 8) == Retention(session="a", reuse_s=5.0)


def test_priorities_are_lowered_to_the_ceiling() -> None:
    assert of_blocks(taken(ceiling=60, priority=100, ranges=[[0, 4, 99], [4, 8, 10]]), 3) == [60, 10, 60]
    assert of_blocks(taken(ceiling=60, priority=40, ranges=[[0, 4, 99]]), 2) == [60, 40]


def test_long_times_are_lowered_to_the_maximum() -> None:
    assert taken(priority=70, ttl_s=1e300, reuse_s=10**400).of_unknown == Retention(70, MAX_RETENTION_S, None, MAX_RETENTION_S)


@pytest.mark.parametrize("hints", [{}, {"priority": 50}, {"ttl_s": 5}, {"ranges": []}, {"priority": None, "session": None}])
def test_hints_that_change_nothing_are_none(hints: dict[str, Any]) -> None:
    assert parse_retention(hints, 75) == (None, [])


@pytest.mark.parametrize(
    ("hints", "left"),
    [
        ({"priority": 101, "session": "a"}, Retention(session="a")),
        ({"priority": True, "session": "a"}, Retention(session="a")),
        ({"priority": 70.5, "session": "a"}, Retention(session="a")),
        ({"priority": 70, "session": ""}, Retention(70)),
        ({"priority": 70, "session": ["a"]}, Retention(70)),
        ({"priority": 70, "session": "a" * 257}, Retention(70)),
        ({"priority": 70, "reuse_s": "30"}, Retention(70)),
        ({"priority": 70, "reuse_s": float("nan")}, Retention(70)),
        ({"priority": 70, "colour": 1}, Retention(70)),
        ({"priority": 70, "ranges": {}}, Retention(70)),
        ({"priority": 70, "ranges": [[4, 4, 90]]}, Retention(70)),
        ({"priority": 70, "ranges": [[-1, 4, 90]]}, Retention(70)),
        ({"priority": 70, "ranges": [[0, 4]]}, Retention(70)),
        ({"priority": 70, "ranges": [[0, 4, 101]]}, Retention(70)),
        ({"priority": 70, "ranges": [7]}, Retention(70)),
        ({"priority": 70, "ranges": [[0, 1, 70]] * (MAX_RANGES + 1)}, Retention(70)),
        ("high", None),
        ([70], None),
        ({"priority": "high"}, None),
    ],
)
def test_malformed_members_are_ignored(hints: Any, left: Retention | None) -> None:
    found, problems = parse_retention(hints, PRIORITIES)
    assert (found.of_unknown if found is not None else None) == left
    assert len(problems) == 1


@pytest.mark.parametrize("ttl_s", [0, -1, "60", True])
def test_priority_with_a_malformed_end_is_ignored(ttl_s: Any) -> None:
    """It would not end."""
    found, problems = parse_retention({"priority": 70, "ttl_s": ttl_s, "session": "a", "ranges": [[0, 4, 90]]}, PRIORITIES)
    assert found is not None
    assert found.of_unknown == Retention(session="a")
    assert len(problems) == 1


@given(hints=st.fixed_dictionaries({}, optional=dict.fromkeys(("priority", "ttl_s", "session", "reuse_s", "ranges", "x"), JSON)) | JSON)
def test_no_value_of_json_is_an_error(hints: Any) -> None:
    found, _ = parse_retention(hints, 75)
    assert found is None or all(hint.priority <= 75 for hint in found.of_tokens)


@given(
    ranges=st.lists(
        st.tuples(st.integers(0, 20), st.none() | st.integers(1, 20), st.integers(0, PRIORITIES)).filter(
            lambda given: given[1] is None or given[0] < given[1]
        ),
        max_size=5,
    ),
    priority=st.integers(0, PRIORITIES),
)
def test_block_has_the_highest_priority_of_its_tokens(ranges: list[tuple[int, int | None, int]], priority: int) -> None:
    """Compare with the rule applied token by token."""

    def of_token(token: int) -> int:
        return max((each for start, end, each in ranges if start <= token and (end is None or token < end)), default=priority)

    found, _ = parse_retention({"priority": priority, "ranges": [list(each) for each in ranges]}, PRIORITIES)
    hints = found or RequestRetention([0], [NO_HINT], NO_HINT)
    wanted = [max(map(of_token, range(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS))) for block in range(7)]
    assert of_blocks(hints, 7) == wanted


def test_reader_takes_nothing_unless_the_setting_allows_it() -> None:
    params = {"retention": {"priority": 70}}
    reader = RetentionReader(Settings(retention_from_requests=False), LOG)
    assert reader.read(params) is None
    assert reader.take_counts() == (0, 0)
    allowed = RetentionReader(Settings(retention_ceiling=60), LOG).read(params)
    assert allowed is not None
    assert allowed.of_unknown == Retention(60)


def test_reader_counts_requests_and_logs_the_first(caplog: pytest.LogCaptureFixture) -> None:
    reader = RetentionReader(Settings(), LOG)
    for hints in ({"priority": 70}, 7, {"reuse_s": 1, "x": 1}, None):
        reader.read({"retention": hints})
    for params in (None, dict[str, object](), 7):
        reader.read(params)
    assert reader.take_counts() == (2, 2)
    assert reader.take_counts() == (0, 0)
    assert len(caplog.records) == 1
