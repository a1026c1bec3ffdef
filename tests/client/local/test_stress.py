"""A process that gives few slots to few blocks as fast as it can, and one that reads them: no wrong byte. `make bench` does it longer."""

from tests.client.local.stress import stress

SECONDS = 2.0


def test_two_processes_that_reuse_and_read_slots_as_fast_as_they_can_agree() -> None:
    counts = stress(SECONDS)
    assert counts.wrong == 0
    assert counts.reused > 0
    assert counts.read > 0
    assert counts.viewed > 0
