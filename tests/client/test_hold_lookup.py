"""Lookups that hold what they find, against a scripted cluster: who is asked for what, and what comes of answers that go wrong."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.client.holds import BY_MESSAGE, Hold, HoldLookup, new_hold
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.protocol.node_messages import HOLD_GRANTED, HOLD_MISS, HOLD_REFUSED, HoldBlocks, ReleaseHolds
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline
from tests.client.oracle import Oracle, Pair


class Lookups:
    """Of a client without a node that it reads in shared memory."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.holding = HoldLookup(oracle.resources)
        self.hold = new_hold(10)

    def exist(self, *keys: bytes, hold: Hold | None = None, is_prefix: bool = False, now_ns: int = 0) -> list[bool]:
        lengths = set(map(len, keys))
        operation = self.holding.exist((), keys, lengths, hold or self.hold, Deadline(60.0), now_ns=now_ns, is_prefix=is_prefix)
        found: list[bool] = self.oracle.run(operation)
        return found

    def release(self, hold: Hold | None = None) -> None:
        self.oracle.run(self.holding.release(hold or self.hold))
        while self.oracle.aside:
            self.oracle.run(self.oracle.aside.pop())

    def held(self) -> list[tuple[int, int, list[bytes], list[int]]]:
        return [(one.number, one.ttl_ms, list(one.keys), list(one.generations)) for one in self.oracle.sent(HoldBlocks)]

    def counts(self) -> tuple[int, int]:
        stats = self.oracle.resources.counters.snapshot()
        return stats.held_blocks, stats.unheld_blocks


@pytest.fixture
def lookups(nodes: Pair) -> Lookups:
    return Lookups(Oracle(*nodes))


def store(lookups: Lookups, keys: Sequence[bytes], *nodes: int) -> None:
    for key in keys:
        lookups.oracle.store(key, key, *nodes)


def test_each_node_is_asked_to_hold_its_own_of_what_was_found(lookups: Lookups) -> None:
    store(lookups, [b"a", b"b"], 1)
    store(lookups, [b"c"], 2)
    assert lookups.exist(b"a", b"x", b"b", b"c") == [True, False, True, True]
    number = lookups.hold.number + BY_MESSAGE
    assert lookups.held() == [(number, 10_000, [b"a", b"b"], [1, 2]), (number, 10_000, [b"c"], [3])]
    assert (lookups.counts(), lookups.oracle.together) == ((3, 0), [2])
    assert lookups.oracle.all_given_back()


def test_block_lost_at_its_node_is_not_found(lookups: Lookups) -> None:
    store(lookups, [b"a", b"b", b"c"], 1)
    lookups.oracle.script[HoldBlocks].append(Flags(bytes((HOLD_GRANTED, HOLD_MISS, HOLD_REFUSED))))
    assert lookups.exist(b"a", b"b", b"c") == [True, False, True]
    assert lookups.counts() == (1, 1)
    assert lookups.oracle.resources.hints.find([b"b"]) == [None]


@pytest.mark.parametrize("failure", [Unavailable("gone"), DeadlineExceeded("slow"), Flags(b"\1")])
def test_what_a_node_does_not_hold_is_found_all_the_same(lookups: Lookups, failure: Any) -> None:
    store(lookups, [b"a", b"b"], 1)
    lookups.oracle.script[HoldBlocks].extend([failure] * 4)
    assert lookups.exist(b"a", b"b") == [True, True]
    assert lookups.counts() == (0, 2)


def test_a_release_tells_all_nodes_that_were_asked_once(lookups: Lookups) -> None:
    store(lookups, [b"a"], 1)
    store(lookups, [b"b"], 2)
    lookups.exist(b"a", b"b")
    lookups.release()
    assert [list(one.numbers) for one in lookups.oracle.sent(ReleaseHolds)] == [[lookups.hold.number + BY_MESSAGE]] * 2
    lookups.release()
    lookups.release(new_hold(1))
    assert len(lookups.oracle.sent(ReleaseHolds)) == 2
    assert lookups.oracle.all_given_back()
