"""Five hundred simulated clusters under faults, the schedules that once found something, and what makes both worth trusting."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from kvstore.master.directory.placement.home_copies import HomeCopies
from tests.simulation.__main__ import first_kind, main
from tests.simulation.cluster import Shape
from tests.simulation.run import run_schedule
from tests.simulation.schedule import Schedule, Step, make_demotions, make_schedule
from tests.simulation.seeded_bugs import BUGS
from tests.simulation.shrinking import shrink

SEEDS, ALWAYS = 500, 100
"""In all, and of them in every run."""
SEEDS_A_TEST = 25
OPERATIONS = 12
BUG, KIND = "acknowledged_before_published", "acknowledged and not durable"
"""One that is put into the product, and what is found of it."""
KEPT = sorted((Path(__file__).parent / "seeds").glob("*.json"))
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.promise("heals")
@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first >= ALWAYS)) for first in range(0, SEEDS, SEEDS_A_TEST)]
)
def test_no_seed_finds_anything(first: int) -> None:
    struck = faults = acknowledged = 0
    for seed in range(first, first + SEEDS_A_TEST):
        outcome = run_schedule(make_schedule(seed, operations=OPERATIONS))
        again = f"python -m tests.simulation --seed {seed} --operations {OPERATIONS} --trace"
        assert not outcome.findings, f"{outcome.findings[0]}; {again}"
        struck, faults, acknowledged = struck + outcome.struck, faults + outcome.faults.total(), acknowledged + outcome.acknowledged
    assert struck >= 0.05 * faults, "a fault counts only where something was under way"
    assert acknowledged > SEEDS_A_TEST


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_what_a_schedule_once_found_it_does_not_find_any_more(path: Path) -> None:
    assert run_schedule(Schedule.from_json(path.read_text())).findings == ()


@pytest.mark.slow
def test_a_seed_is_the_same_history_in_every_process() -> None:
    runs = [*((seed, 24) for seed in range(7, 10)), (23, 12)]  # of (23, 12) two puts end at once: where they lay in memory said which first
    program = (
        "from tests.simulation.run import run_schedule\nfrom tests.simulation.schedule import make_schedule\n"
        f"for seed, count in {runs}: print(run_schedule(make_schedule(seed, operations=count)).trace_hash)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'build/typing'}:{ROOT}"}
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**environment, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=240,
        ).stdout
        for hash_seed in ("1", "2")
    }
    here = "".join(f"{run_schedule(make_schedule(seed, operations=count)).trace_hash}\n" for seed, count in runs)
    assert told == {here}
    assert len(set(here.split())) == len(runs)


def test_a_schedule_is_the_same_again_from_its_text() -> None:
    schedule = make_schedule(3)
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_no_copy_stays_secondary_once_its_home_dies() -> None:
    """node-1, which has the copies of what node-0 took when it was nearly full, dies; then node-0 is to evict by value again."""
    puts = tuple(Step(300.0 * number, "put", (0, "red", str(number), "node", 2500)) for number in range(12))
    shape = Shape(masters=1, nodes=2, clients=1, dram_bytes=24 << 10)
    schedule = Schedule(1, shape, (*puts, Step(300.0 * len(puts) + 1000, "kill_node", (1, 500))))
    assert run_schedule(schedule).findings == ()
    with patch.object(HomeCopies, "take_primary", lambda _self: []):  # else the test shows nothing
        assert [finding.kind for finding in run_schedule(schedule).findings] == ["a secondary copy without a home"]


@pytest.mark.promise("remove-stays-removed")
@pytest.mark.parametrize("seed", range(3))
def test_removed_blocks_do_not_return_from_disk(seed: int) -> None:
    assert run_schedule(make_demotions(seed)).findings == ()


def finding_schedule() -> Schedule:
    """The first that finds BUG, which is to be in place."""
    return next(schedule for seed in range(SEEDS) if first_kind(schedule := make_schedule(seed)) == KIND)


def test_what_finds_a_bug_is_cut_down_to_what_it_takes() -> None:
    with BUGS[BUG]():
        schedule = finding_schedule()
        small = shrink(schedule, first_kind)
        assert first_kind(small) == KIND
    assert len(small.steps) <= 3 < len(schedule.steps)
    assert first_kind(small) == ""
    assert shrink(small, first_kind) == small, "without a finding there is nothing to cut down"


def test_the_command_replays_a_finding_with_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.json"
    with BUGS[BUG]():
        path.write_text(finding_schedule().to_json())
        assert main(["--schedule", str(path), "--trace"]) == 1
    told = capsys.readouterr().out
    assert f"FINDING {KIND}" in told
    assert "Publish(" in told, "every message"
    assert "the least of it" in told
    assert main(["--seeds", "0:2"]) == 0
    assert "2 runs" in capsys.readouterr().out
