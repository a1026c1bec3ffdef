"""A process that gives few slots to few blocks as fast as it can, and one that reads them: no wrong byte. `make bench` does it longer."""

import pytest

from tests.client.local.stress import stress

SECONDS = 2.0


@pytest.mark.promise("shm-reads-whole")
def test_reader_and_writer_processes_agree_under_stress() -> None:
    counts = stress(SECONDS)
    assert counts.wrong == 0
    assert counts.reused > 0
    assert counts.read > 0
    assert counts.viewed > 0
