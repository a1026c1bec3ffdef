"""Exceptions of signal handlers in a caller of the transceiver, at any moment.

A call raises the exception only after all accesses to the blocks have ended.
"""

import pytest

from tests.line_child import LineChild

STRIKES = 100
TRANSPORTS = pytest.mark.parametrize("transports", ["tcp", "shm,tcp"])


@pytest.mark.promise("handover-fenced")
@TRANSPORTS
@pytest.mark.parametrize("role", ["receiver", "sender"])
def test_interrupted_request_is_over_on_both_sides(role: str, transports: str) -> None:
    with LineChild("tests.handover.struck_rank", role, transports, str(STRIKES)) as child:
        found = child.answer()
    assert found["touched"] == 0
    assert found["unfinished"] <= max(5, found["struck"] // 10)  # struck before the first instruction of a call: as before it
    assert found["left"] == [0, 0]
    assert found["struck"] > STRIKES // 20


@pytest.mark.promise("handover-fenced")
@TRANSPORTS
def test_interrupted_close_closes_the_transceiver(transports: str) -> None:
    with LineChild("tests.handover.struck_rank", "close", transports, "10") as child:
        found = child.answer()
    assert found["touched"] == 0
    assert found["struck"] > 0
