"""Promises of sweep.py: the same of each seed whichever process runs it, and totals that can be cited."""

from collections import Counter

import pytest

from tests.simulation.__main__ import main
from tests.simulation.sweep import Tally, Totals, sweep

SEEDS = range(10)


def test_several_processes_find_of_each_seed_what_one_does() -> None:
    alone = list(sweep(SEEDS, operations=6, processes=1))
    assert [tally.seed for tally in alone] == list(SEEDS)
    assert sum(tally.faults.total() for tally in alone) > 0
    assert list(sweep(SEEDS, operations=6, processes=2)) == alone


def test_totals_name_operations_seeds_faults_by_kind_and_what_was_found() -> None:
    totals = Totals()
    totals.add(Tally(3, 30, 10, Counter(cut=1, slow=1), 1, 5.0, ""))
    totals.add(Tally(4, 20, 5, Counter(cut=2), 2, 6.0, "a lost block"))
    told = str(totals)
    for part in (
        "2 runs, 50 operations (15 puts acknowledged)",
        "4 faults, 75% with",
        "11 s of simulated time, 1 findings",
        "cut 3, slow 1",
    ):
        assert part in told
    assert totals.found == {"a lost block": [4]}
    assert "faults: none" in str(Totals())


@pytest.mark.parametrize("given", [["--seeds", "0:1", "--trace"], ["--seeds", "0:1", "--processes", "0"]])
def test_what_does_not_go_together_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(given)
    assert "--trace is for a single run" in capsys.readouterr().err
