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
