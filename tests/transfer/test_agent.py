"""Promises of agent.py: requests, the interface's defaults, and the bounded queue of notifications."""

import pytest

from kvstore.protocol.errors import DeadlineExceeded, Full, Unreachable
from kvstore.protocol.transfers import MAX_NOTICE_BYTES
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import PATIENCE_S, SHORT_S, in_background, is_quiet, within
from kvstore.transfer.agent import MAX_NOTICES, MAX_NOTICES_BYTES, AgentRequest, Direction, Notices
from kvstore.transfer.memory.region import Piece
from tests.rpc.raw_peers import make_region, shown


@pytest.mark.promise("memory-bounded")
@pytest.mark.parametrize(("size_bytes", "most"), [(0, MAX_NOTICES), (MAX_NOTICE_BYTES - 1, MAX_NOTICES_BYTES // MAX_NOTICE_BYTES)])
def test_what_nobody_takes_is_bounded_in_number_and_in_bytes(size_bytes: int, most: int) -> None:
    notices, message = Notices("here"), bytes(size_bytes)
    for _ in range(most):
        notices.put("t", message)
    with pytest.raises(Full, match=f"here has {most} queued notifications"):
        notices.put("t", message)
    assert len(notices.take()) == most
    notices.put("t", message)
    assert len(notices.take()) == 1


def a_request(**fields: object) -> AgentRequest:
    region = make_region(100)
    pieces = [Piece(region, 0, shown(region), 50, 20), Piece(region, 20, shown(region), 70, 30)]
    return AgentRequest(Direction.READ, "peer", pieces, Deadline(PATIENCE_S), **fields)  # type: ignore[arg-type]


def test_whoever_waits_is_told_of_the_end() -> None:
    request = a_request()
    waiting = [in_background(lambda: request.wait(Deadline(PATIENCE_S))) for _ in range(2)]
    assert all(is_quiet(future) for future in waiting)
    request.finish(Unreachable("gone"))
    for future in waiting:
        with pytest.raises(Unreachable, match="gone"):
            future.result(PATIENCE_S)


def test_waiting_ends_at_the_deadline_though_the_request_goes_on() -> None:
    request = a_request()
    with within(SHORT_S), pytest.raises(DeadlineExceeded):
        request.wait(Deadline(SHORT_S))
    assert not request.is_over
