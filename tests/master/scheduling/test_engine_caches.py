"""Tests of engine_caches.py: prefixes at each instance, changes that do not fit are not taken, and nothing grows without end."""

from collections.abc import Sequence
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.scheduling.engine_caches import MAX_CHANGED_BLOCKS, EngineCaches
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument

KEYS = [b"%04d" % number for number in range(20)]


def change(added: list[bytes], removed: Sequence[bytes] = (), *, base: int = 0, version: int = 0, tenant: str = "t") -> pb.EngineCache:
    return pb.EngineCache(
        tenant=tenant,
        base_version=base,
        version=version or base + 1,
        key_bytes=4,
        added=b"".join(added),
        removed=b"".join(removed),
    )


def test_each_has_the_run_that_it_told_of() -> None:
    caches = EngineCaches(max_blocks=100)
    caches.apply("a", change(KEYS[:8]))
    caches.apply("b", change(KEYS[:3] + KEYS[4:]))
    assert caches.match("t", KEYS, ["b", "a", "nobody"]) == [3, 8, 0]
    caches.apply("a", change(KEYS[8:10], KEYS[5:6], base=1))
    assert caches.match("t", KEYS, ["a"]) == [5]
    assert caches.version("a") == 2
    assert (caches.version("nobody"), caches.blocks("nobody")) == (0, 0)
    assert caches.blocks("a") == 9


def test_a_change_of_another_version_is_not_taken() -> None:
    caches = EngineCaches(max_blocks=100)
    caches.apply("a", change(KEYS[:8], base=3))
    assert caches.version("a") == 0
    caches.apply("a", change(KEYS[:8]))
    caches.apply("a", change(KEYS[8:9], base=2))
    caches.apply("a", change(KEYS[8:9], base=1, tenant="other"))
    assert (caches.version("a"), caches.match("t", KEYS, ["a"])) == (1, [8])


def test_an_instance_that_begins_again_has_what_it_tells_then() -> None:
    caches = EngineCaches(max_blocks=100)
    caches.apply("a", change(KEYS[:8], version=7))
    caches.apply("a", change(KEYS[:2], version=9))
    assert (caches.version("a"), caches.match("t", KEYS, ["a"])) == (9, [2])


def test_tenants_see_nothing_of_each_other() -> None:
    caches = EngineCaches(max_blocks=100)
    caches.apply("a", change(KEYS, tenant="one"))
    caches.apply("b", change(KEYS[:5], tenant="two"))
    assert caches.match("one", KEYS, ["a", "b"]) == [20, 0]
    assert caches.match("two", KEYS, ["a", "b"]) == [0, 5]
    assert caches.match("three", KEYS, ["a", "b"]) == [0, 0]


def test_who_leaves_has_nothing_and_leaves_nothing() -> None:
    caches = EngineCaches(max_blocks=100)
    caches.apply("a", change(KEYS))
    caches.apply("b", change(KEYS))
    caches.leave("a")
    caches.leave("a")
    assert caches.match("t", KEYS, ["a", "b"]) == [0, 20]
    caches.apply("c", change(KEYS[:1]))
    assert caches.match("t", KEYS, ["c", "b"]) == [1, 20]
    for name in "bc":
        caches.leave(name)
    assert not any(vars(caches)[name] for name in ("_caches", "_indexes", "_numbers"))


class NotWalked(dict[bytes, int]):
    """Looked up in, never walked through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("all blocks of the tenant are looked at")

    items = keys = values = __iter__


def test_leave_costs_only_the_instances_own_blocks() -> None:
    caches = EngineCaches(max_blocks=100)
    caches.apply("a", change(KEYS[:4]))
    caches.apply("b", change(KEYS))
    index = caches._indexes["t"]
    index._holders = NotWalked(index._holders)
    caches.apply("a", change(KEYS[2:3]))
    assert caches.match("t", KEYS[2:], ["a", "b"]) == [1, 18]
    caches.leave("a")
    assert caches.match("t", KEYS, ["a", "b"]) == [0, 20]
    caches.leave("b")
    assert not any(vars(caches)[name] for name in ("_caches", "_indexes", "_numbers"))


def test_what_one_has_beyond_the_limit_is_not_known_of() -> None:
    caches = EngineCaches(max_blocks=5)
    caches.apply("a", change(KEYS[:8]))
    assert caches.match("t", KEYS, ["a"]) == [5]
    caches.apply("a", change(KEYS[5:7], KEYS[4:5] + KEYS[7:8], base=1))
    assert caches.match("t", KEYS, ["a"]) == [4], "one has left, one has come"
    caches.apply("a", change(KEYS[4:5], KEYS[5:6], base=2))
    assert caches.match("t", KEYS, ["a"]) == [5]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (pb.EngineCache(version=1, key_bytes=0, added=b"aaaa"), "whole keys"),
        (pb.EngineCache(version=1, key_bytes=256, added=b"a" * 256), "whole keys"),
        (pb.EngineCache(version=1, key_bytes=4, added=b"aaaaa"), "whole keys"),
        (pb.EngineCache(version=1, key_bytes=4, removed=b"aaaaa"), "whole keys"),
        (pb.EngineCache(version=1, key_bytes=1, added=b"a" * MAX_CHANGED_BLOCKS, removed=b"a"), "65537 changed blocks"),
        (pb.EngineCache(version=0, key_bytes=4, added=b"aaaa"), "count from 1"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(wrong: pb.EngineCache, says: str) -> None:
    caches = EngineCaches(max_blocks=100)
    caches.apply("a", change(KEYS))
    with pytest.raises(InvalidArgument, match=says):
        caches.apply("a", wrong)
    assert (caches.version("a"), caches.match("t", KEYS, ["a"])) == (1, [20])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.sets(st.sampled_from(KEYS)), st.sets(st.sampled_from(KEYS)))))
def test_any_changes_leave_what_sets_would(steps: list[tuple[str, bool, set[bytes], set[bytes]]]) -> None:
    caches = EngineCaches(max_blocks=len(KEYS))
    naive: dict[str, set[bytes]] = {}
    for number, (name, afresh, added, removed) in enumerate(steps, start=1):
        base = 0 if afresh else caches.version(name)
        naive[name] = (set() if not base else naive[name] - removed) | added
        caches.apply(name, change(sorted(added), sorted(removed), base=base, version=number))
    for name, held in naive.items():
        run = next((index for index, key in enumerate(KEYS) if key not in held), len(KEYS))
        assert caches.match("t", KEYS, [name]) == [run]
