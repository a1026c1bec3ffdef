"""Promises of agent.py: requests, the interface's defaults, and notifications that nobody takes."""

from collections.abc import Callable
from threading import Event

import pytest

from kvstore.protocol.errors import DeadlineExceeded, Full, InvalidArgument, Unreachable
from kvstore.protocol.transfers import MAX_NOTICE_BYTES
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.waiting import PATIENCE_S, SHORT_S, eventually, in_background, is_quiet, within
from kvstore.transfer.agent import MAX_NOTICES, MAX_NOTICES_BYTES, Direction, Notices, Rail, Remote, Request, TransferAgent, cancelled
from kvstore.transfer.memory.region import Piece
from tests.rpc.raw_peers import make_region, shown


def test_they_are_told_once_in_order_with_their_sender() -> None:
    notices = Notices("here")
    for message in (b"one", b"", b"x" * MAX_NOTICE_BYTES):
        notices.put("there", message)
    assert notices.take() == [("there", b"one"), ("there", b""), ("there", b"x" * MAX_NOTICE_BYTES)]
    assert notices.take() == []


def test_one_that_is_too_long_is_refused() -> None:
    notices = Notices("here")
    with pytest.raises(InvalidArgument, match=f"at most {MAX_NOTICE_BYTES} bytes"):
        notices.put("there", bytes(MAX_NOTICE_BYTES + 1))
    assert notices.take() == []


@pytest.mark.parametrize(("size_bytes", "most"), [(0, MAX_NOTICES), (MAX_NOTICE_BYTES - 1, MAX_NOTICES_BYTES // MAX_NOTICE_BYTES)])
def test_what_nobody_takes_is_bounded_in_number_and_in_bytes(size_bytes: int, most: int) -> None:
    notices, message = Notices("here"), bytes(size_bytes)
    for _ in range(most):
        notices.put("t", message)
    with pytest.raises(Full, match=f"here has {most} notifications that nobody took"):
        notices.put("t", message)
    assert len(notices.take()) == most
    notices.put("t", message)
    assert len(notices.take()) == 1


class OwnAgent(TransferAgent):
    """The least that a plug-in has: what becomes of a request is the test's."""

    transport = "own"

    def __init__(self, act: Callable[[Request], None] = lambda request: None) -> None:
        super().__init__("own", Rail())
        self.submit = act  # type: ignore[method-assign, assignment]
        self.users = 0

    def metadata(self) -> bytes:
        return b""

    def load_remote(self, metadata: bytes) -> Remote:
        return metadata

    def submit(self, request: Request) -> None:
        raise AssertionError("replaced")

    def notify(self, remote: Remote, message: bytes, deadline: Deadline) -> None:
        pass

    def notifications(self) -> list[tuple[str, bytes]]:
        return []

    def close(self) -> None:
        pass


def a_request(**fields: object) -> Request:
    region = make_region(100)
    pieces = [Piece(region, 0, shown(region), 50, 20), Piece(region, 20, shown(region), 70, 30)]
    return Request(Direction.READ, "peer", pieces, Deadline(PATIENCE_S), **fields)  # type: ignore[arg-type]


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


def test_transfer_returns_when_it_is_over_and_holds_the_memory_until_then() -> None:
    region, users = make_region(10), []

    def act(request: Request) -> None:
        users.append(region.users)
        request.finish()

    OwnAgent(act).transfer(Direction.WRITE, "peer", [Piece(region, 0, shown(region), 0, 10)], Deadline(PATIENCE_S))
    assert users == [1]
    assert region.users == 0


def test_transfer_raises_what_the_request_failed_with() -> None:
    region = make_region(10)
    agent = OwnAgent(lambda request: request.finish(Unreachable("gone")))
    with pytest.raises(Unreachable):
        agent.transfer(Direction.WRITE, "peer", [Piece(region, 0, shown(region), 0, 10)], Deadline(PATIENCE_S))
    assert region.users == 0


class Cancelling(OwnAgent):
    def cancel(self, request: Request) -> None:
        request.finish(cancelled())


def test_transfer_cancels_what_is_not_over_at_its_deadline() -> None:
    begun: list[Request] = []
    region = make_region(10)
    with within(SHORT_S), pytest.raises(DeadlineExceeded):
        Cancelling(begun.append).transfer(Direction.WRITE, "peer", [Piece(region, 0, shown(region), 0, 10)], Deadline(SHORT_S))
    assert begun[0].is_over


def test_transfer_with_an_agent_that_cannot_cancel_raises_when_the_request_is_over() -> None:
    begun: list[Request] = []
    region = make_region(10)
    agent = OwnAgent(begun.append)
    pieces = [Piece(region, 0, shown(region), 0, 10)]
    waiting = in_background(lambda: agent.transfer(Direction.WRITE, "peer", pieces, Deadline(SHORT_S)))
    eventually(lambda: bool(begun), "it has begun")
    assert isinstance(wait_for(begun[0]), DeadlineExceeded)
    assert is_quiet(waiting)
    assert region.users == 1
    begun[0].finish()
    with pytest.raises(DeadlineExceeded):
        waiting.result(PATIENCE_S)
    assert region.users == 0


def wait_for(request: Request) -> BaseException | None:
    """What waiting until its deadline comes to."""
    return in_background(lambda: request.wait(request.deadline)).exception(PATIENCE_S)


def test_an_agent_that_registers_nothing_reaches_all_memory_and_forgets_peers_without_effect() -> None:
    agent, asked = OwnAgent(), Event()
    assert agent.export(make_region(1)) == b""
    agent.unload_remote("peer")
    agent.run(a_request(callback=lambda request: asked.set()))
    assert not asked.is_set()
    assert (agent.name, agent.rail, agent.window) == ("own", Rail(), 8)
