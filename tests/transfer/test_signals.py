"""Exceptions of signal handlers, at any time in a transfer and repeated: when it is raised, no byte moves any more."""

import json

import pytest

from tests.forked import said

RAISED = 200


@pytest.mark.promise("interrupts-safe")
@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_no_memory_is_touched_after_an_interrupted_transfer(transports: str, direction: str) -> None:
    told = said("tests.transfer.signal_storm", transports, direction, str(RAISED))
    touched, raised, users, in_flight, is_whole = json.loads(told)
    assert touched == 0, "memory changed, or was read, after the call had raised"
    assert raised >= RAISED
    assert (users, in_flight) == (0, 0), "nothing is held or in flight"
    assert is_whole, "transfers without signals succeed"


@pytest.mark.promise("interrupts-safe")
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_an_interrupted_submit_leaves_no_transfer(transports: str) -> None:
    left, is_whole = json.loads(said("tests.transfer.submit_storm", transports, str(10 * RAISED)))
    assert left == 0, "transfers went on after submit had raised"
    assert is_whole, "transfers without signals succeed"
