"""Whatever a signal handler raises in the middle of a transfer, and however often: when it comes out, no byte moves any more."""

import json
import subprocess
import sys

import pytest

RAISED = 200


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_nothing_touches_memory_after_a_transfer_was_struck_and_the_engine_goes_on(transports: str, direction: str) -> None:
    command = [sys.executable, "-m", "tests.transfer.signal_storm", transports, direction, str(RAISED)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    touched, raised, users, in_flight, is_whole = json.loads(said.stdout)
    assert touched == 0, "memory changed, or was read, after the call had raised"
    assert raised >= RAISED
    assert (users, in_flight) == (0, 0), "nothing is held or in flight"
    assert is_whole, "transfers without signals succeed"


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_submit_that_was_struck_leaves_no_transfer_that_nobody_knows_of(transports: str) -> None:
    command = [sys.executable, "-m", "tests.transfer.submit_storm", transports, str(10 * RAISED)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    left, is_whole = json.loads(said.stdout)
    assert left == 0, "transfers went on after submit had raised"
    assert is_whole, "transfers without signals succeed"
