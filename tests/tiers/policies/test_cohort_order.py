"""Promises of cohort_order.py: leaves come in the order of their rings' worth, orphans first, and empty rings are passed over."""

from kvstore.tiers.policies.cohort_order import RINGS, CohortOrder
from kvstore.tiers.policies.hazard import BUCKETS
from kvstore.tiers.policies.interface import DictStates
from kvstore.tiers.policies.visits import Cohort, Run


def fill(order: CohortOrder[str], cohort: Cohort[str], *keys: str, is_tip: bool = False) -> Cohort[str]:
    """Give the cohort its first leaves of that kind."""
    cohort.leaves[is_tip].update(dict.fromkeys(keys))
    order.enter(cohort, is_tip)
    return cohort


def worths(**by_ring: float) -> list[float]:
    """One a ring; those that are not named as r<number> are worth 9."""
    return [by_ring.get(f"r{ring}", 9.0) for ring in range(RINGS)]


def test_without_leaves_there_is_no_first() -> None:
    order: CohortOrder[str] = CohortOrder()
    assert order.first() is None
    assert list(order) == []
    assert order.check_integrity() == {}


def test_leaves_come_by_the_worth_of_their_class_and_kind_and_the_oldest_cohort_of_a_ring_first() -> None:
    order: CohortOrder[str] = CohortOrder()
    order.rank(worths(r0=3, r1=1))
    other_class = 2 * BUCKETS
    early = fill(order, Cohort(0, 1.0), "a", "b")
    fill(order, early, "tip", is_tip=True)
    fill(order, Cohort(0, 2.0), "c")
    fill(order, Cohort(1, 0.0), "d")
    assert order.first() == "tip"
    assert list(order) == ["tip", "a", "b", "c", "d"]
    order.rank(worths(**{f"r{other_class}": 0}))
    assert next(iter(order)) == order.first() == "d"
    order.check_integrity()


def test_orphans_come_before_all_others_whatever_these_are_worth() -> None:
    order: CohortOrder[str] = CohortOrder()
    fill(order, Cohort(0, 0.0), "a")
    fill(order, order.orphans, "orphan")
    order.rank([-1.0] * RINGS)
    assert list(order) == ["orphan", "a"]
    assert order.check_integrity()["orphan"] == (order.orphans, 0)


def test_a_cohort_grows_older_with_the_kinds_of_leaves_that_it_has() -> None:
    order: CohortOrder[str] = CohortOrder()
    order.rank(worths(r2=0, r3=0))
    tips = fill(order, Cohort(0, 0.0), "tip", is_tip=True)
    others = fill(order, Cohort(0, 0.0), "other")
    order.grow_older(tips, 1)
    tips.bucket = 1
    order.check_integrity()
    assert list(order) == ["tip", "other"]
    others.leaves[False].clear()
    order.leave(others, False)
    assert list(order) == ["tip"]


def test_a_cohort_that_left_makes_room_for_the_next_of_its_ring() -> None:
    order: CohortOrder[str] = CohortOrder()
    first, second = fill(order, Cohort(0, 0.0), "a"), fill(order, Cohort(0, 1.0), "b")
    for cohort, left in ((first, "b"), (second, None)):
        cohort.leaves[False].clear()
        order.leave(cohort, False)
        assert order.first() == left
        order.check_integrity()


def test_a_run_is_the_leaves_that_are_left_of_it_in_its_place() -> None:
    order, cohort, nodes = CohortOrder[int](), Cohort[int](0, 0.0), DictStates[int, object]()
    run = Run([7, 8, 9], cohort, nodes)
    nodes.set_all((7, 8, 9), run)
    order.enter(cohort, True)
    cohort.leaves[True].update(dict.fromkeys((run, 5)))
    assert (order.first(), list(order)) == (7, [7, 8, 9, 5])
    del nodes[7]
    run.has_lost(1)
    assert (order.first(), list(order)) == (8, [8, 9, 5])
    assert order.check_integrity() == dict.fromkeys((8, 9, 5), (cohort, 1))
