"""The simulation finds bugs: each that is put into the product is found within the number of seeds that stands here."""

from typing import Final

import pytest

from tests.simulation.run import run_schedule
from tests.simulation.schedule import Schedule, make_demotions, make_schedule
from tests.simulation.seeded_bugs import BUGS

WITHIN: Final = {
    "acknowledged_before_published": 10,
    "told_to_the_first_master": 10,
    "claim_answered_before_durable": 10,
    "generation_not_bumped": 60,
    "epoch_not_compared": 60,
    "removal_forgotten": 8,
    "eviction_not_told": 20,
    "slot_reused_while_shown": 20,
    "decision_ignored": 20,
    "removal_overtakes_a_move": 20,
}
OPERATIONS: Final = {"epoch_not_compared": 60, "removal_forgotten": 100, "eviction_not_told": 60}
DENSITY: Final = {"epoch_not_compared": 2, "removal_forgotten": 4}
"""Density of operations for bugs that the default number and pace do not find."""
PARTITIONS: Final = {"told_to_the_first_master": 2, "epoch_not_compared": 2}
"""Partitions for bugs that exist only with several, or are found sooner with them."""


def schedule_of(name: str, seed: int) -> Schedule:
    if name == "removal_overtakes_a_move":
        return make_demotions(seed)
    return make_schedule(seed, operations=OPERATIONS.get(name, 24), partitions=PARTITIONS.get(name, 0), density=DENSITY.get(name, 1))


@pytest.mark.promise("heals")
@pytest.mark.parametrize("name", list(BUGS))
def test_a_bug_is_found_within_its_seeds(name: str) -> None:
    with BUGS[name]():
        assert any(run_schedule(schedule_of(name, seed)).findings for seed in range(WITHIN[name])), (
            f"{name} was not found within {WITHIN[name]} seeds"
        )
