"""Tests of partition_assigner.py: all masters agree on even shares, few partitions move, and nothing moves in haste."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.leadership.partition_assigner import MAX_PAUSE_NS, MAX_STEPS, PartitionAssigner, RebalanceTiming, order, shares

MASTERS = [f"master-{number}:7440" for number in range(9)]
SETTLE_NS, PAUSE_NS, TURN_S = 4_000_000_000, 1_500_000_000, 0.3
PATIENCE = RebalanceTiming(4.0, 1.5, 0.3)
SOME = st.sets(st.sampled_from(MASTERS), min_size=1).map(frozenset)


@pytest.mark.promise("failover")
@given(SOME, st.integers(1, 64))
def test_shares_are_even_and_all_partitions_are_somebodys(live_masters: frozenset[str], count: int) -> None:
    found = shares(live_masters, count)
    assert len(found) == count
    held = Counter(found)
    sizes = [held[master] for master in live_masters]
    assert max(sizes) - min(sizes) <= 1


@given(SOME, st.integers(0, 63))
def test_order_is_independent_of_other_masters(live_masters: frozenset[str], partition: int) -> None:
    assert order(live_masters, partition) == [master for master in order(MASTERS, partition) if master in live_masters]


def test_what_a_master_had_goes_to_all_others() -> None:
    before = shares(frozenset(MASTERS[:4]), 64)
    after = shares(frozenset(MASTERS[:3]), 64)
    gone = [now for was, now in zip(before, after, strict=True) if was == MASTERS[3]]
    assert len(gone) == 16
    assert set(gone) == set(MASTERS[:3])
    assert sum(was != now for was, now in zip(before, after, strict=True)) < 64 * 0.6


class Turned:
    """Two masters and four partitions, of which `mine` is the first one's share."""

    def __init__(self) -> None:
        self.live_masters = frozenset(MASTERS[:2])
        found = shares(self.live_masters, 4)
        self.mine = {partition for partition in range(4) if found[partition] == MASTERS[0]}
        self.sharing = PartitionAssigner(MASTERS[0], 4, PATIENCE)

    def give_up(self, now_ns: int, owned: set[int] | None = None) -> int | None:
        return self.sharing.give_up(self.live_masters, set(range(4)) if owned is None else owned, now_ns)


def test_others_share_is_given_up_one_at_a_time_when_settled() -> None:
    turned = Turned()
    assert turned.give_up(0) is None
    assert turned.give_up(SETTLE_NS - 1) is None
    first = turned.give_up(SETTLE_NS)
    assert first is not None
    left = set(range(4)) - {first}
    assert turned.give_up(SETTLE_NS + PAUSE_NS - 1, left) is None
    second = turned.give_up(SETTLE_NS + PAUSE_NS, left)
    assert second is not None
    assert {first, second} == set(range(4)) - turned.mine
    assert turned.give_up(SETTLE_NS + 2 * PAUSE_NS, turned.mine) is None


def test_who_comes_or_goes_begins_the_wait_anew() -> None:
    turned = Turned()
    turned.give_up(0)
    turned.live_masters = frozenset(MASTERS[:3])
    assert turned.give_up(SETTLE_NS) is None
    assert turned.give_up(2 * SETTLE_NS) is not None


def test_what_comes_back_is_kept_for_longer_each_time() -> None:
    turned = Turned()
    turned.give_up(0)
    others = set(range(4)) - turned.mine
    now_ns, pause_ns, given = SETTLE_NS, SETTLE_NS, min(others)
    while pause_ns < MAX_PAUSE_NS:
        assert turned.give_up(now_ns, {given}) == given
        assert turned.give_up(now_ns + max(pause_ns, PAUSE_NS) - 1, {given}) is None
        now_ns, pause_ns = now_ns + pause_ns, min(2 * pause_ns, MAX_PAUSE_NS)
    assert turned.give_up(now_ns, {given}) == given
    assert turned.give_up(now_ns + MAX_PAUSE_NS, {given}) == given


def test_regained_share_is_given_up_at_once_when_lost_again() -> None:
    turned = Turned()
    turned.give_up(0)
    given = turned.give_up(SETTLE_NS)
    assert given is not None
    both, turned.live_masters = turned.live_masters, frozenset(MASTERS[:1])
    turned.give_up(2 * SETTLE_NS)
    assert turned.give_up(3 * SETTLE_NS) is None, "all are its own"
    turned.live_masters = both
    turned.give_up(4 * SETTLE_NS)
    assert turned.give_up(5 * SETTLE_NS, {given}) == given


def test_who_is_not_known_to_live_gives_nothing_up() -> None:
    for live_masters in (frozenset[str](), frozenset(MASTERS[1:])):
        sharing = PartitionAssigner(MASTERS[0], 4, PATIENCE)
        sharing.give_up(live_masters, {0, 1, 2, 3}, 0)
        assert sharing.give_up(live_masters, {0, 1, 2, 3}, SETTLE_NS) is None


@pytest.mark.parametrize("count", [3, 9])
def test_unowned_partition_is_taken_in_its_order(count: int) -> None:
    live_masters = frozenset(MASTERS[:count])
    for partition, owner in enumerate(shares(live_masters, 4)):
        waits = {master: PartitionAssigner(master, 4, PATIENCE).wait_s(live_masters, partition) for master in live_masters}
        assert waits[owner] == 0
        rest = [master for master in order(live_masters, partition) if master != owner]
        assert [waits[master] for master in rest] == [min(turn, MAX_STEPS) * TURN_S for turn in range(1, count)]


def test_where_who_lives_is_not_known_nobody_waits() -> None:
    assert PartitionAssigner(MASTERS[0], 4, PATIENCE).wait_s(frozenset(), 0) == 0
    assert all(PartitionAssigner(MASTERS[0], 4, PATIENCE).wait_s(frozenset(MASTERS[1:3]), partition) == 0 for partition in range(4))


def test_recently_taken_partition_is_kept() -> None:
    """Its former owner counts as alive still: who lives is looked at now and then."""
    turned = Turned()
    turned.give_up(0, turned.mine)
    taken_ns = 2 * SETTLE_NS
    assert turned.give_up(taken_ns) is None
    assert turned.give_up(taken_ns + SETTLE_NS - 1) is None
    assert turned.give_up(taken_ns + SETTLE_NS) is not None
    assert turned.give_up(taken_ns + 2 * SETTLE_NS, turned.mine) is None
    assert turned.give_up(taken_ns + 3 * SETTLE_NS) is None, "it has been away and is back"
