"""What a report of chaos says: counts by kind, stalls, and whether the run shows anything."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.journal import Act, Journal, Outcome, read
from tests.faults.judging import Verdict
from tests.faults.reporting import MORE_DESCRIPTORS, MORE_MEMORY, Done, Report, daemons_changed, printed

S = 1_000_000_000
USED = {"m0": {"memory_bytes": 100, "descriptors": 10}}


@pytest.fixture
def journals(tmp_path: Path) -> list[tuple[int, Any]]:
    """One client whose calls take 10 ms each and end every second, but for one that waits from 4 s to 7 s."""
    journal = Journal(tmp_path / "j")
    for second in (1, 2, 3, 8, 9):
        journal.note(Act.GET, Outcome.DONE, 0, second * S - S // 100, second * S)
    journal.note(Act.GET, Outcome.DONE, 0, 4 * S, 7 * S)
    journal.close()
    return [(0, read(tmp_path / "j")), (9, read(tmp_path / "j")[:0])]


def report(journals: list[tuple[int, Any]], *faults: Done, verdict: Verdict | None = None, trouble: list[str] | None = None) -> Report:
    return Report.made(1, 10.0, verdict or Verdict(), faults, journals, USED, USED, trouble or [], writers=8)


def test_faults_are_counted_by_kind_with_those_in_flight_felt_and_the_longest_stall(journals: list[tuple[int, Any]]) -> None:
    felt, calm, missed = (
        Done("cut", "", 5 * S, 5 * S, 6 * S, 7 * S),
        Done("cut", "", 2 * S, 5 * S // 2, 3 * S, 3 * S),
        Done("point", "", 1, 0, 2, 3),
    )
    told = report(journals, felt, calm, missed)
    cut = told.kinds["cut"]
    assert (cut.made, cut.struck, cut.in_flight, cut.felt, cut.longest_stall_s) == (2, 2, 1, 1, 4.0)
    point = told.kinds["point"]
    assert (point.made, point.struck, point.in_flight, point.longest_stall_s) == (1, 0, 0, 0.0)
    assert told.felt_share == pytest.approx(1 / 3)
    assert told.is_good
    assert told.as_json()["is_good"] is True


def test_a_run_without_faults_that_were_felt_shows_nothing(journals: list[tuple[int, Any]]) -> None:
    assert not report(journals).is_good
    assert not report(journals, Done("cut", "", 2 * S, 5 * S // 2, 3 * S, 3 * S)).is_good


def test_a_violation_or_trouble_makes_it_bad_and_is_printed(journals: list[tuple[int, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    felt, verdict = Done("cut", "", 5 * S, 5 * S, 6 * S, 7 * S), Verdict()
    verdict.violate("lost", "a block")
    bad = report(journals, felt, verdict=verdict)
    assert not bad.is_good
    assert not report(journals, felt, trouble=["not at rest"]).is_good
    printed(bad)
    assert "lost: a block" in capsys.readouterr().out
    told = json.loads(json.dumps(bad.as_json()))
    assert (told["is_good"], told["verdict"]["violations"], told["verdict"]["examples"]) == (False, {"lost": 1}, ["lost: a block"])


def test_what_daemons_have_more_of_is_told_beyond_an_allowance() -> None:
    within = {"m0": {"memory_bytes": 100 + MORE_MEMORY, "descriptors": 10 + MORE_DESCRIPTORS}}
    beyond = {"m0": {"memory_bytes": 101 + MORE_MEMORY, "descriptors": 11 + MORE_DESCRIPTORS}}
    assert daemons_changed(USED, within) == []
    assert len(daemons_changed(USED, beyond)) == 2
