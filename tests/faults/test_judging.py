"""The judge of journals: what it must let pass, and what it must not."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.journal import Act, BlockName, Journal, Outcome, read
from tests.faults.judging import Circumstances, Judge, Times, Verdict

BLOCK = BlockName(3, 1, 7)
WRITER, OTHER = 3, 5
QUIET = Circumstances(Times(()), deadline_ns=1000, grace_ns=100)
Row = tuple[Act, Outcome, int, int, int, int]
"""Act, outcome, began, ended, version or mask, ack."""
PUT: list[Row] = [(Act.PUT, Outcome.BEGUN, 10, 0, 0, 1), (Act.PUT, Outcome.DONE, 10, 20, 0, 1), (Act.LOCATE, Outcome.DONE, 25, 30, 0b10, 0)]
REPLACED: list[Row] = [(Act.PUT, Outcome.BEGUN, 50, 0, 1, 1), (Act.PUT, Outcome.DONE, 50, 60, 1, 1)]
REMOVED: list[Row] = [(Act.REMOVE, Outcome.BEGUN, 50, 0, 0, 0), (Act.REMOVE, Outcome.DONE, 50, 60, 0, 0)]


def judged(
    folder: Path, written: list[Row], read_: list[Row], told: Circumstances = QUIET, *, reader: int = OTHER, since_ns: int = 0
) -> Verdict:
    journals: list[tuple[int, Any]] = []
    for writer, rows in ((WRITER, written), (reader, read_)):
        path = folder / f"{len(journals)}.journal"
        path.unlink(missing_ok=True)
        journal = Journal(path)
        for act, outcome, began, ended, version, ack in rows:
            journal.note(act, outcome, BLOCK.packed(), began, ended, version=version, ack=ack)
        journal.close()
        journals.append((writer, read(path)))
    return Judge(journals, told).judge(since_ns=since_ns)


def hit(began: int, ended: int, version: int = 0) -> list[Row]:
    return [(Act.GET, Outcome.DONE, began, ended, version, 0)]


def miss(began: int, ended: int) -> list[Row]:
    return [(Act.GET, Outcome.ABSENT, began, ended, 0, 0)]


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        (PUT, hit(12, 15)),
        (PUT, hit(40, 45)),
        (PUT + REPLACED, hit(40, 70)),
        (PUT + REPLACED, hit(55, 70)),
        (PUT + REPLACED, hit(70, 80, 1)),
        (PUT + REMOVED, miss(70, 80)),
        (PUT + REMOVED, miss(40, 80)),
        (PUT + REMOVED, hit(40, 80)),
        (PUT[:1], hit(5000, 6000)),
        (PUT[:2], miss(40, 45)),
        ([*PUT[:2], (Act.LOCATE, Outcome.DONE, 25, 30, 0, 0)], miss(40, 45)),
        ([], miss(40, 45)),
    ],
)
def test_what_could_be_is_let_pass(tmp_path: Path, written: list[Row], rows: list[Row]) -> None:
    assert judged(tmp_path, written, rows).violations == {}


@pytest.mark.parametrize(
    ("written", "rows", "kind"),
    [
        (PUT, hit(1, 5), "never put"),
        ([], hit(1, 5), "never put"),
        (PUT + REPLACED, hit(70, 80), "stale"),
        (PUT + REMOVED, hit(61, 80), "stale"),
        (PUT, miss(40, 45), "lost"),
        (PUT, [(Act.GET, Outcome.WRONG, 40, 45, 0, 0)], "wrong bytes"),
        (PUT, [(Act.GET, Outcome.UNEXPECTED, 40, 45, 0, 0)], "unexpected error"),
        (PUT, hit(40, 1141), "beyond its deadline"),
    ],
)
def test_what_could_not_be_is_a_violation(tmp_path: Path, written: list[Row], rows: list[Row], kind: str) -> None:
    assert judged(tmp_path, written, rows).violations == {kind: 1}


def test_a_put_for_the_node_is_to_be_found_by_its_own_writer(tmp_path: Path) -> None:
    early = [(*row[:5], 0) for row in PUT]
    assert judged(tmp_path, early, miss(40, 45), reader=OTHER).violations == {}
    assert judged(tmp_path, early, miss(40, 45), reader=WRITER).violations == {"lost": 1}


def test_judge_misses_under_faults_are_no_loss(tmp_path: Path) -> None:
    disturbed = Circumstances(Times([(40, 90)]))
    assert judged(tmp_path, PUT, miss(45, 50), disturbed).violations == {}
    assert judged(tmp_path, PUT, miss(91, 95), disturbed).violations == {"lost": 1}
    assert judged(tmp_path, PUT + REMOVED, hit(70, 80), disturbed).violations == {}
    assert judged(tmp_path, PUT + REMOVED, hit(95, 99), disturbed).violations == {"stale": 1}
    assert judged(tmp_path, PUT + REPLACED, hit(95, 99), disturbed).violations == {}, "it may have come back"


def test_judge_lost_node_blocks_need_no_other_replica(tmp_path: Path) -> None:
    both: list[Row] = [*PUT[:2], (Act.LOCATE, Outcome.DONE, 25, 30, 0b11, 0)]
    told = Circumstances(Times(()), lost={1: [35]})
    assert judged(tmp_path, PUT, miss(40, 45), told).violations == {}
    assert judged(tmp_path, PUT, miss(32, 33), told).violations == {"lost": 1}
    assert judged(tmp_path, both, miss(40, 45), told).violations == {"lost": 1}


def test_judge_excludes_time_the_caller_was_stopped(tmp_path: Path) -> None:
    told = Circumstances(Times(()), deadline_ns=1000, grace_ns=100, stopped={OTHER: Times([(100, 300)])})
    assert judged(tmp_path, PUT, hit(40, 1340), told).violations == {}
    assert judged(tmp_path, PUT, hit(40, 1341), told).violations == {"beyond its deadline": 1}
