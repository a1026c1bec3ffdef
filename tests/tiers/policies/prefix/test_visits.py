"""Visits are of the class that they say, and the log learns of each block once."""

import pytest

from kvstore.tiers.policies.prefix import visits
from kvstore.tiers.policies.prefix.visits import Visit, VisitLog


def visit(*, turn: int = 1, blocks: int = 8, new_blocks: int = 0, forks: int = 0, tip: str = "z") -> Visit[str]:
    made: Visit[str] = Visit()
    made.turn, made.blocks, made.new_blocks, made.forks, made.tip = turn, blocks, new_blocks, forks, tip
    return made


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


def test_what_is_watched_adds_up() -> None:
    """In any schedule, the watched weight equals that of the unread blocks."""
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
