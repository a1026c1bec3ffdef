"""Removals of objects: a leased object stays unless the removal is forced.

Patterns match keys as they do in Mooncake's master.
"""

import pytest

from kvstore.client import Client
from kvstore.engines.mooncake.arguments import ReplicateConfig
from kvstore.engines.mooncake.removals import compiled
from kvstore.engines.mooncake.store import MooncakeDistributedStore
from kvstore.protocol.errors import InvalidArgument
from tests.client.processes import Cluster


def test_removal_tells_what_was_there(store: MooncakeDistributedStore) -> None:
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    store.put_batch(["a", "b"], [b"1", b"2"])
    store.put("held", b"3", pinned)
    assert store.remove("a") == 0
    assert store.batch_remove(["a", "b", "held"]) == [-704, 0, -706]
    assert store.batch_remove(["held"], force=True) == [0]


def test_a_pattern_is_looked_for_anywhere_in_a_key(store: MooncakeDistributedStore) -> None:
    store.put_batch(["model@rank:0@x", "model@rank:1@x", "other"], [b"1", b"2", b"3"])
    assert store.remove_by_regex(r"@rank:\d@") == 2
    assert store.batch_is_exist(["model@rank:0@x", "other"]) == [0, 1]
    assert store.remove_by_regex("^ther") == 0
    assert store.remove_by_regex("(") == -600
    assert store.remove_by_regex("^[[:alpha:]]ther$", force=True) == 1


def test_all_are_all_of_this_api_and_no_others(store: MooncakeDistributedStore, running: Cluster) -> None:
    with Client(running.address) as client:
        client.put(b"native", b"value", ack="cluster")
        store.put_batch(["a", "b"], [b"1", b"2"])
        assert store.remove_all() == 2
        assert (store.remove_all(), client.exists(b"native")) == (0, True)
        client.remove([b"native"])


MATCHES = [
    *(("a1", "xa1y"), ("^a", "ab"), ("b$", "ab"), ("[[:alpha:]]1", "_b1"), ("[^[:alpha:]]", "ab1"), (r"\d\w\s", "1_ "), ("a{2}", "aa")),
    *(("a{1,}?", "a"), ("(?:a|b)c", "bc"), ("(?=a)a", "a"), ("(?!a).", "b"), (r"[\w-]", "-"), (r"[a\]]", "]"), ("[-a]", "-"), ("}", "}")),
    *(("]", "]"), (r"\n", "\n"), (r"[\b]", "\b"), (r"[\D]", "a"), ("[a&&b]", "&"), ("é", "é"), ("a*?b", "aab"), (r"\ba\b", "-a-")),
    *(("[^a-c]", "d"), ("", "x"), ("~#", "~#"), ("(|a)b", "b"), ("[[a]", "["), ("[a-z-9]", "9")),
]
MISSES = [(".", "\r"), ("b$", "b\n"), ("^b", "a\nb"), ("[[:upper:]]", "a"), (r"\w", "é"), ("a", "")]
REFUSED = [
    *("(", ")", "[", "[a", "[z-a]", "*", "a|*", "(*a)", "{", "a{", "a{,2}", "a{2,1}", "(?i)a", "(?<=a)b", "(?P<n>a)", "(?#x)", "(?"),
    *("(" * 5000, "\\", "[a\\", r"\c", "[[:bad:]]", "[[:alpha", "a{99999999999999999999}"),
]
RARE = ["[[.a.]]", "[[=a=]]", "[]", "[^]", r"(a)\1", r"\x61", r"\u0061", r"\cA", r"\0", r"\Q", "a**", "a++", "a{2}{2}"]
"""Mooncake takes them, and Python reads them otherwise or not at all."""


@pytest.mark.parametrize(("pattern", "key"), MATCHES)
def test_pattern_matches_as_in_mooncake(pattern: str, key: str) -> None:
    assert compiled(pattern).search(key.encode())


@pytest.mark.parametrize(("pattern", "key"), MISSES)
def test_pattern_misses_as_in_mooncake(pattern: str, key: str) -> None:
    assert not compiled(pattern).search(key.encode())


@pytest.mark.parametrize("pattern", REFUSED + RARE)
def test_other_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="no regular expression"):
        compiled(pattern)
