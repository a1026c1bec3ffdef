"""Tests of membership/reads.py: last reads."""

import math

import pytest

from kvstore.master.directory.membership import reads as module
from kvstore.master.directory.membership.reads import LastReads, NamespaceLastRead
from kvstore.protocol.errors import InvalidArgument

S = 1_000_000_000


def test_the_last_read_at_any_node_counts() -> None:
    reads = LastReads()
    reads.take([NamespaceLastRead("red", "a", 5.0), NamespaceLastRead("red", "b", 1.0)], 10 * S)
    reads.take([NamespaceLastRead("red", "a", 7.0), NamespaceLastRead("red", "b", 0.0)], 11 * S)
    assert reads.age_s("red", "a", 12 * S) == 7.0
    assert reads.age_s("red", "b", 12 * S) == 1.0
    assert reads.age_s("blue", "a", 12 * S) is None
    assert reads.age_s("red", "b", 10 * S) == 0.0


@pytest.mark.parametrize("age_s", [-1.0, math.nan, math.inf])
def test_an_age_that_is_none_is_refused(age_s: float) -> None:
    with pytest.raises(InvalidArgument, match="an age is finite"):
        LastReads().take([NamespaceLastRead("red", "a", age_s)], 0)


def test_few_are_taken_of_a_node_and_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPORTED", 2)
    monkeypatch.setattr(module, "MAX_NAMESPACES", 2)
    reads = LastReads()
    reads.take([NamespaceLastRead("red", name, 0.0) for name in "abc"], 0)
    assert reads.age_s("red", "c", 0) is None
    reads.take([NamespaceLastRead("red", "d", 0.0)], S)
    assert [reads.age_s("red", name, S) for name in "abd"] == [None, 1.0, 0.0]
