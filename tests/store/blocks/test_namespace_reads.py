"""Promises of namespace_reads.py."""

import pytest

from kvstore.store.blocks import counts as module
from kvstore.store.blocks.counts import NamespaceRead, NamespaceReads
from tests.store.made import made

S = 1_000_000_000


def test_last_read_first_with_its_age() -> None:
    reads = NamespaceReads()
    assert list(reads.told(0)) == []
    for name, at_s in (("a", 1), ("b", 2), ("a", 3)):
        reads.note(made("red", b"k", 1, 1, name))
        reads.stamp(at_s * S)
    reads.note(made("blue", b"k", 1, 1, "a"))
    assert list(reads.told(5 * S)) == [NamespaceRead("red", "a", 2.0), NamespaceRead("red", "b", 3.0)], "what is noted waits for its time"
    reads.stamp(6 * S)
    assert next(reads.told(4 * S)) == NamespaceRead("blue", "a", 0.0)


def test_only_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOLD", 2)
    reads = NamespaceReads()
    for at, name in enumerate("abc"):
        reads.note(made("red", b"k", 1, 1, name))
        reads.stamp(at * S)
    assert [one.namespace for one in reads.told(3 * S)] == ["c", "b"]
