"""The simulation finds bugs: each that is put into the product is found within the number of seeds that stands here."""

import pytest

from tests.simulation.run import run_schedule
from tests.simulation.schedule import make_schedule
from tests.simulation.seeded_bugs import BUGS

WITHIN = dict.fromkeys(BUGS, 200)


@pytest.mark.parametrize("name", list(BUGS))
def test_a_bug_is_found_within_its_seeds(name: str) -> None:
    with BUGS[name]():
        assert any(run_schedule(make_schedule(seed)).findings for seed in range(WITHIN[name]))
