"""Visits are of the class that they say, and the log learns of each block once."""

import pytest

from kvstore.tiers.policies import visits
from kvstore.tiers.policies.hazard import BUCKETS, EDGES_S
from kvstore.tiers.policies.visits import CLASSES, FIRST_TURNS, LATER_TURNS, TICK_S, Visit, VisitLog


def visit(*, turn: int = 1, blocks: int = 8, new_blocks: int = 0, forks: int = 0, tip: str = "z") -> Visit[str]:
    made: Visit[str] = Visit()
    made.turn, made.blocks, made.new_blocks, made.forks, made.tip = turn, blocks, new_blocks, forks, tip
    return made


def test_classes_are_distinct_and_all_there_are() -> None:
    shared = [visit(forks=forks).classify() for forks in (4, 15, 16, 63, 64, 1000)]
    assert shared == [0, 0, 1, 1, 2, 2]
    first = [visit(blocks=blocks).classify() for blocks in (1, 4, 16, 64, 128)]
    assert first == list(range(FIRST_TURNS, LATER_TURNS))
    later = [visit(turn=turn, new_blocks=new).classify() for turn in (2, 3, 4, 5, 6) for new in (0, 3, 6)]
    assert later == list(range(LATER_TURNS, CLASSES))
    assert visit(turn=90, new_blocks=900).classify() == CLASSES - 1


def test_the_rest_of_a_prompt_counts_what_came_before() -> None:
    begun = visit(turn=3, blocks=10, new_blocks=2, tip="k")
    rest = visit(blocks=7)
    rest.follow(begun, "k", 1, 0)
    assert (rest.turn, rest.before, rest.new_blocks) == (3, 10, 2)
    more = visit(blocks=100)
    rest.tip = "l"
    rest.turn = 1
    more.follow(rest, "l", 1, 0)
    assert more.classify() == visit(blocks=117).classify()


def test_a_branch_is_a_turn_later_than_what_it_branches_from() -> None:
    branch = visit()
    branch.follow(visit(turn=7, tip="end"), "middle", 2, 1)
    assert (branch.turn, branch.before) == (3, 0)


def test_below_a_shared_prefix_something_new_begins() -> None:
    new = visit()
    new.follow(visit(turn=5, tip="prefix"), "prefix", 3, 4)
    assert (new.turn, new.before) == (1, 0)


def test_a_block_read_again_is_one_share_of_its_visit() -> None:
    log: VisitLog[str] = VisitLog()
    seen = visit(blocks=4, tip="d")
    cohort = log.end(seen, 0.0)
    before = log.hazard.worth(1.0)[cohort.klass]
    for key in "abc":
        log.read(seen, key, 0.05)
    assert cohort.unread == pytest.approx(0.25)
    assert (log.tips, log.tips_read) == (2, 1)
    log.read(seen, "d", 0.05)
    assert cohort.unread == pytest.approx(0.0)
    assert (log.tips, log.tips_read) == (2, 2)
    assert log.hazard.worth(1.0)[cohort.klass][0] > before[0]


def test_the_end_of_a_shared_prefix_is_no_end_of_a_prompt() -> None:
    log: VisitLog[str] = VisitLog()
    seen = visit(blocks=2, forks=9, tip="b")
    log.end(seen, 0.0)
    log.read(seen, "b", 1.0)
    assert (log.tips, log.tips_read) == (1, 1)


def test_a_visit_under_way_teaches_nothing_yet() -> None:
    log: VisitLog[str] = VisitLog()
    under_way = visit()
    log.read(under_way, "a", 1.0)
    assert under_way.cohort is None
    assert (len(log), log.tips) == (0, 1)


def test_visits_of_one_class_and_tick_grow_older_together() -> None:
    log: VisitLog[str] = VisitLog()
    first = log.end(visit(), 10.0)
    assert log.end(visit(), 10.0 + TICK_S / 2) is first
    assert log.end(visit(turn=4), 10.0) is not first
    assert log.end(visit(), 10.0 + TICK_S) is not first
    assert log.cohort(first.klass, 10.0 + 2 * TICK_S) is not first
    assert log.cohort(first.klass, 10.0 + 2 * TICK_S) is log.end(visit(), 10.0 + 2 * TICK_S)
    assert first.unread == 2


def test_what_has_grown_older_takes_nobody_in() -> None:
    log: VisitLog[str] = VisitLog()
    older = log.end(visit(), 0.0)
    log.advance(EDGES_S[1])
    assert log.end(visit(), 0.0) is not older


def test_cohorts_grow_older_and_say_so_before() -> None:
    told: list[tuple[int, int]] = []
    log: VisitLog[str] = VisitLog(lambda cohort, bucket: told.append((cohort.bucket, bucket)))
    cohort = log.end(visit(), 0.0)
    log.advance(EDGES_S[1] / 2)
    assert cohort.bucket == 0
    log.advance(EDGES_S[3])
    assert cohort.bucket == 3
    assert told == [(0, 3)]
    log.advance(1e9)
    assert cohort.bucket == BUCKETS - 1


def test_the_oldest_cohort_is_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "MAX_COHORTS", 2)
    log: VisitLog[str] = VisitLog()
    seen = visit()
    first = log.end(seen, 0.0)
    log.advance(10.0)
    second, third = log.end(visit(), 10.0), log.end(visit(), 20.0)
    assert len(log) == 2
    assert (first.is_watched, second.is_watched, third.is_watched) == (False, True, True)
    log.read(seen, "z", 20.0)
    assert first.unread == 1


def test_a_forgotten_cohort_takes_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "MAX_COHORTS", 1)
    log: VisitLog[str] = VisitLog()
    forgotten = log.end(visit(), 0.0)
    log.end(visit(turn=5), 0.0)
    assert log.end(visit(), 0.0) is not forgotten


def test_what_is_watched_adds_up() -> None:
    """Whatever happens to visits, the weight that is watched is that of their unread blocks."""
    log: VisitLog[str] = VisitLog()
    cohorts = set()
    for index in range(50):
        seen = visit(blocks=3, turn=index % 7 + 1)
        cohorts.add(log.end(seen, index / 20))
        if index % 3 == 0:
            log.read(seen, "x", index / 20)
        log.advance(index / 20)
    assert len(cohorts) == len(log)
    assert sum(log.hazard._watched) == pytest.approx(sum(cohort.unread for cohort in cohorts))
    assert sum(cohort.unread for cohort in cohorts) == pytest.approx(50 - 17 / 3)


def test_many_first_visits_of_a_block_each_end_as_one_by_one() -> None:
    together: VisitLog[str] = VisitLog()
    singly: VisitLog[str] = VisitLog()
    cohort = together.end_alone(3, 5.0)
    for _ in range(3):
        last = visit(blocks=1, new_blocks=1)
        singly.end(last, 5.0)
        assert last.cohort is not None
        assert (last.cohort.klass, last.cohort.time_s) == (cohort.klass, cohort.time_s)
    assert last.cohort is not None
    assert cohort.unread == last.cohort.unread == 3
    assert together.hazard.worth(9.0).tolist() == singly.hazard.worth(9.0).tolist()
