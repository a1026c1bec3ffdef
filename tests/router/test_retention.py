"""The header with a request's retention hints."""

import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.retention import MAX_RETENTION_S, PRIORITIES
from kvstore.router.retention import RETENTION_HEADER, parse_retention


def parsed(text: str, ceiling: int = PRIORITIES) -> object:
    return parse_retention({RETENTION_HEADER: text}, ceiling)


def test_members_of_the_header_are_those_of_a_hint() -> None:
    hints = {"priority": 70, "ttl_s": 600, "session": "chat-7", "reuse_s": 1.5}
    assert parsed("priority=70, ttl_s=600, session=chat-7, reuse_s=1.5") == hints
    assert parsed(" reuse_s = 1.5,session=chat-7 ,ttl_s=600,priority=70") == hints
    assert parsed("session=a=b") == {"session": "a=b"}


def test_request_without_the_header_has_no_hints() -> None:
    assert parse_retention({}, 75) is None


def test_priority_is_lowered_to_the_ceiling() -> None:
    assert parsed("priority=90", 60) == {"priority": 60}
    assert parsed("priority=40", 60) == {"priority": 40}
    assert parsed("session=a", 40) == {"session": "a"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "priority", "priority=", "priority=high", "priority=101", "priority=-1", "priority=70.0", "colour=1", "priority=70,"),
        *("priority=1, priority=2", "ttl_s=0", "ttl_s=nan", "ttl_s=inf", f"ttl_s={MAX_RETENTION_S + 1}", "reuse_s=soon", "session="),
        *(f"session={'a' * 257}", "session=a, b"),
    ],
)
def test_malformed_header_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the header {RETENTION_HEADER}"):
        parsed(text)
