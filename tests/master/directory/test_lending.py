"""Promises of lending.py: shares of a limit go where they are wanted, and are never more than the limit together."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import lending, records
from kvstore.master.directory.following import Followed
from kvstore.master.directory.lending import ASK_INTERVAL_NS, Lending
from kvstore.security.quotas.quota import SHARED, Quota

PINS, RESERVATIONS = 0, 1


class Partition:
    """A partition's catalog, and its owner. Every owner follows the catalogs of the others, and may be behind in each."""

    def __init__(self, cluster: "Cluster", index: int) -> None:
        self.cluster, self.index = cluster, index
        self.log: list[list[Op]] = []
        """What is durable."""
        self.used = [0, 0]
        self.take_over()

    def take_over(self) -> None:
        """The next owner knows all of its own catalog, and of the others nothing yet. Pins stay, reservations are forgotten."""
        self.views = [Followed() for _ in range(self.cluster.count)]
        self.seen = [0] * self.cluster.count
        self.under_way: deque[list[Op]] = deque()
        mine = Followed()
        for ops in self.log:
            mine.take(ops)
        self.used[RESERVATIONS] = 0
        self.lending = Lending(
            self.index,
            self.cluster.count,
            mine.loans,
            quota_of=lambda _tenant: self.cluster.quota,
            elsewhere=lambda: [v.loans for v in self.views],
        )

    def write(self, ops: Sequence[Op]) -> None:
        if ops:
            self.under_way.append(list(ops))

    def commit(self) -> None:
        """The oldest write is durable."""
        if self.under_way:
            self.log.append(self.under_way.popleft())

    def hear(self, other: int) -> None:
        """Of the next change in another catalog."""
        log = self.cluster.partitions[other].log
        if other != self.index and self.seen[other] < len(log):
            self.views[other].take(log[self.seen[other]])
            self.seen[other] += 1

    def tick(self) -> None:
        self.write(self.lending.give(lambda _tenant: self.used, self.cluster.now_ns))

    def share(self, limit: int) -> int:
        found = self.lending.share_of("red", limit)
        assert found is not None
        return found.now

    def take(self, limit: int, count: int) -> bool:
        """What a master does with a request of the tenant."""
        if self.used[limit] + count <= self.share(limit):
            self.used[limit] += count
            return True
        self.write(self.lending.ask("red", limit, count, self.used[limit], self.cluster.now_ns))
        return False


class Cluster:
    def __init__(self, count: int, quota: Quota) -> None:
        self.count, self.quota, self.now_ns = count, quota, 0
        self.partitions: list[Partition] = []
        self.partitions += [Partition(self, index) for index in range(count)]

    def settle(self) -> None:
        """All that is on its way arrives, and is acted upon."""
        for _ in range(3):
            for one in self.partitions:
                one.tick()
                while one.under_way:
                    one.commit()
            for one in self.partitions:
                for other in range(self.count):
                    for _ in self.partitions[other].log:
                        one.hear(other)

    def insists(self, index: int, limit: int, count: int) -> bool:
        """Asks for it until it has it, or has asked often."""
        for _ in range(40):
            if self.partitions[index].take(limit, count):
                return True
            self.settle()
            self.now_ns += ASK_INTERVAL_NS
        return False

    def check(self) -> None:
        for limit, name in enumerate(SHARED):
            whole = getattr(self.quota, name)
            assert whole is None or sum(max(one.share(limit), one.used[limit]) for one in self.partitions) <= whole


def cluster_of(count: int, *, pins: int | None = None, reservations: int | None = None) -> Cluster:
    cluster = Cluster(count, Quota(pins=pins, reservations=reservations))
    cluster.settle()
    return cluster


@pytest.mark.parametrize(("count", "whole", "shares"), [(4, 10, [3, 3, 2, 2]), (4, 2, [1, 1, 0, 0]), (2, 0, [0, 0]), (1, 7, [7])])
def test_partitions_begin_with_even_shares_that_are_the_limit_together(count: int, whole: int, shares: list[int]) -> None:
    cluster = cluster_of(count, pins=whole)
    assert [one.share(PINS) for one in cluster.partitions] == shares
    assert all(one.lending.share_of("red", RESERVATIONS) is None for one in cluster.partitions)


def test_a_tenant_without_such_limits_has_no_share_of_them() -> None:
    for count in (1, 4):
        cluster = cluster_of(count)
        cluster.quota = Quota(dram_bytes=100, connections=7)
        assert [cluster.partitions[0].lending.share_of("red", limit) for limit in (PINS, RESERVATIONS)] == [None, None]
        assert not cluster.partitions[0].lending.may_grow("red", PINS, 1)
        assert cluster.partitions[0].lending.ask("red", PINS, 1, 0, 0) == []


@pytest.mark.parametrize("limit", [PINS, RESERVATIONS])
def test_a_tenant_whose_keys_are_all_of_one_partition_has_the_whole_limit_and_no_more(limit: int) -> None:
    cluster = cluster_of(4, pins=10, reservations=10)
    for _ in range(10):
        assert cluster.insists(2, limit, 1)
        cluster.check()
    assert not cluster.insists(2, limit, 1)
    assert not cluster.insists(0, limit, 1)
    cluster.partitions[2].used[limit] = 4
    assert cluster.insists(0, limit, 6), "what is free again goes to who wants it"
    assert not cluster.insists(3, limit, 1)
    cluster.check()


def test_a_limit_that_is_lowered_is_not_exceeded_where_one_has_given_the_other_more_than_it_has_now() -> None:
    cluster = cluster_of(2, pins=100)
    assert cluster.insists(1, PINS, 100)
    cluster.quota = Quota(pins=10)
    assert [one.share(PINS) for one in cluster.partitions] == [0, 10]
    cluster.partitions[1].used[PINS] = 9
    assert cluster.insists(0, PINS, 1), "what the first owes it is given too"
    assert [one.share(PINS) for one in cluster.partitions] == [1, 9]
    cluster.partitions[1].used[PINS] = 0
    assert cluster.insists(0, PINS, 9)
    cluster.quota = Quota(pins=40)
    assert sum(one.share(PINS) for one in cluster.partitions) == 40


def test_who_gives_one_of_several_that_owe_what_it_owes_keeps_what_it_needs_itself() -> None:
    cluster = cluster_of(4, pins=100)
    for index in (2, 3):
        assert cluster.insists(index, PINS, 50)
    cluster.quota = Quota(pins=12)
    assert [one.share(PINS) for one in cluster.partitions] == [0, 0, 6, 6]
    cluster.partitions[2].used[PINS], cluster.partitions[3].used[PINS] = 5, 0
    assert cluster.insists(0, PINS, 1)
    cluster.check()
    assert cluster.insists(1, PINS, 6)
    cluster.check()


def test_what_was_given_to_a_partition_that_there_is_not_counts_for_nobody() -> None:
    damaged = {"red": records.LoansRecord("red", given={(PINS, 7): 3})}
    assert Lending(0, 2, damaged, quota_of=lambda _tenant: Quota(pins=4)).share_of("red", PINS) == (2, 4)


def test_more_than_the_whole_limit_is_not_asked_for() -> None:
    cluster = cluster_of(2, pins=4)
    lent = cluster.partitions[0].lending
    assert lent.may_grow("red", PINS, 4)
    assert not lent.may_grow("red", PINS, 5)
    assert lent.ask("red", PINS, 5, 0, 0) == []


def test_the_same_is_asked_for_again_after_a_while_only() -> None:
    lent = cluster_of(2, pins=4, reservations=4).partitions[0].lending
    assert lent.ask("red", PINS, 1, 2, 0)
    assert lent.ask("red", RESERVATIONS, 1, 2, 0), "another limit"
    assert lent.ask("red", PINS, 1, 2, ASK_INTERVAL_NS - 1) == []
    assert lent.ask("red", PINS, 1, 2, ASK_INTERVAL_NS)
    assert [asked.number for asked in lent.now["red"].asked] == [2, 1]


def test_of_two_that_ask_at_once_the_first_is_given_what_there_is() -> None:
    cluster = cluster_of(2, pins=4)
    for one in cluster.partitions:
        assert not one.take(PINS, 3)
    cluster.settle()
    assert [one.share(PINS) for one in cluster.partitions] == [3, 1]


def test_what_was_asked_before_an_owner_was_one_it_gives_nothing_for() -> None:
    cluster = cluster_of(2, pins=4)
    assert not cluster.partitions[1].take(PINS, 3)
    cluster.partitions[1].commit()
    cluster.partitions[0].take_over()
    cluster.partitions[0].hear(1)
    cluster.settle()
    assert cluster.partitions[1].share(PINS) == 2
    assert cluster.insists(1, PINS, 4)


def test_what_others_may_count_with_is_what_is_durable() -> None:
    lent = Lending(0, 2, {}, quota_of=lambda _tenant: Quota(pins=4))
    assert lent.ask("red", PINS, 1, 2, 0)
    asked = lent.now
    assert (lent.durable, len(asked)) == ({}, 1)
    lent.written(asked)
    assert lent.durable is asked


def test_loans_of_so_many_tenants_are_kept_and_those_that_have_no_such_limit_any_more_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "MAX_TENANTS", 1)
    quotas = {"red": Quota(pins=4), "blue": Quota(pins=4)}
    asking, giving = [Followed(), Followed()], Followed()
    lent = Lending(0, 2, {}, quota_of=lambda tenant: quotas[tenant], elsewhere=lambda: [giving.loans, asking[1].loans])
    assert lent.give(lambda _tenant: (0, 0), 0) == []
    assert lent.ask("red", PINS, 1, 2, 0)
    assert lent.ask("blue", PINS, 1, 2, 0) == []
    asking[1].take([records.put_loans(records.LoansRecord("blue", (records.Asked(1, 1), records.Asked())))])
    assert lent.give(lambda _tenant: (0, 0), 0) == []
    assert [lent.share_of(tenant, PINS) for tenant in ("red", "blue", "red")] == [(2, 4)] * 3, "however many are kept in mind"
    quotas["red"] = Quota()
    ops = lent.ask("blue", PINS, 1, 2, 0)
    assert ops[0] == records.delete_loans("red")
    assert list(lent.now) == ["blue"]


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.integers(0, 12), st.integers(0, 12), st.integers(0, 1 << 32))
def test_whatever_is_late_and_whoever_dies_all_together_never_have_more_than_the_limit(
    count: int, pins: int, reservations: int, seed: int
) -> None:
    rng, cluster = random.Random(seed), Cluster(count, Quota(pins=pins, reservations=reservations))
    for _ in range(120):
        one, limit = rng.choice(cluster.partitions), rng.choice((PINS, RESERVATIONS))
        match rng.choice(["take", "take", "free", "tick", "commit", "hear", "hear", "hear", "time", "die"]):
            case "take":
                one.take(limit, rng.randint(1, 4))
            case "free":
                one.used[limit] = rng.randint(0, one.used[limit])
            case "tick":
                one.tick()
            case "commit":
                one.commit()
            case "hear":
                one.hear(rng.randrange(count))
            case "time":
                cluster.now_ns += ASK_INTERVAL_NS
            case "die":
                one.take_over()
        cluster.check()
    cluster.settle()
    for limit, whole in enumerate((pins, reservations)):
        free = whole - sum(one.used[limit] for one in cluster.partitions)
        assert not free or cluster.insists(rng.randrange(count), limit, free), "what is free can be had, wherever it is"
        cluster.check()


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(0, 1000), min_size=2, max_size=4), st.integers(0, 1 << 32))
def test_whatever_limits_an_operator_sets_one_after_the_other_no_more_is_granted_than_the_last(
    count: int, limits: list[int], seed: int
) -> None:
    rng, cluster = random.Random(seed), Cluster(count, Quota())
    for whole in limits:
        cluster.quota = Quota(pins=whole)
        cluster.settle()
        for one in cluster.partitions:
            one.used[PINS] = min(one.used[PINS], one.share(PINS))  # what is above it stays until it is let go
        for _ in range(60):
            one = rng.choice(cluster.partitions)
            match rng.choice(["take", "take", "free", "tick", "commit", "hear", "hear", "time"]):
                case "take":
                    one.take(PINS, rng.randint(1, whole // 2 + 1))
                case "free":
                    one.used[PINS] = rng.randint(0, one.used[PINS])
                case "tick":
                    one.tick()
                case "commit":
                    one.commit()
                case "hear":
                    one.hear(rng.randrange(count))
                case "time":
                    cluster.now_ns += ASK_INTERVAL_NS
            cluster.check()
        cluster.settle()
