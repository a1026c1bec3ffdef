"""Retention hints refuse values out of range."""

from typing import Any

import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.retention import Retention, session_id


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": -1},
        {"priority": 101},
        {"priority": True},
        {"priority": 50.0},
        {"ttl_s": 0},
        {"ttl_s": 8 * 86_400},
        {"ttl_s": "1"},
        {"reuse_s": -1.0},
        {"reuse_s": float("nan")},
        {"session": ""},
        {"session": "s" * 257},
        {"session": b"s"},
    ],
)
def test_retention_refuses_values_out_of_range(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(fields))):
        Retention(**fields)


def test_session_ids_differ_and_take_any_text() -> None:
    assert len({session_id(name) for name in ("a", "b", "a ", "\ud800")}) == 4
    assert all(0 < session_id(name) < 1 << 64 for name in ("a", "\ud800"))
