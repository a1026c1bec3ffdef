"""Whatever a signal handler raises in the middle of a transfer, and however often: when it comes out, no byte moves any more."""

import json

import pytest

from tests.forked import said

RAISED = 200


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_nothing_touches_memory_after_a_transfer_was_struck_and_the_engine_goes_on(transports: str, direction: str) -> None:
    told = said("tests.transfer.signal_storm", transports, direction, str(RAISED))
    touched, raised, users, in_flight, is_whole = json.loads(told)
    assert touched == 0, "memory changed, or was read, after the call had raised"
    assert raised >= RAISED
    assert (users, in_flight) == (0, 0), "nothing is held or in flight"
    assert is_whole, "transfers without signals succeed"


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_submit_that_was_struck_leaves_no_transfer_that_nobody_knows_of(transports: str) -> None:
    left, is_whole = json.loads(said("tests.transfer.submit_storm", transports, str(10 * RAISED)))
    assert left == 0, "transfers went on after submit had raised"
    assert is_whole, "transfers without signals succeed"
