"""Promises of the mover: order, windows, retries, and the ends of transfers that race with the ends of their requests."""

import threading
from collections.abc import Iterator

import pytest

from kvstore.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    Denied,
    InvalidArgument,
    StaleHandle,
    Unreachable,
)
from kvstore.testing.transfer.awaited import PATIENCE_S
from kvstore.transfer.agent import AgentRequest
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.path_chooser import PathState
from kvstore.transfer.paths.transfers import Priority, Transfer
from tests.transfer.faulty import DELIVER, FAULTY, SPARE, WAIT, Answer, FaultyAgent, RaisingAgent, SpareAgent, agents, settings, topology

SLICE = 64


class Scene:
    """An engine with one rail of each of two transports, a peer with a region of ten slices, and the results of transfers."""

    def __init__(self, transports: str = f"{FAULTY},{SPARE}", *, max_attempts: int = 6) -> None:
        config, links = settings(transports, max_attempts=max_attempts), topology("rail0")
        self.engine = TransferEngine("me", config, topology=links, clock_ns=lambda: 0)
        self.other = TransferEngine("other", config, topology=links)
        self.region = self.other.register(bytearray(range(10)) * SLICE)
        peer = self.engine.connect(self.other.describe())
        self.remote = self.engine.import_region(peer, self.other.export(self.region, writable=True))
        self.agent, *others = agents(self.engine)
        self.spare = others[0] if others else self.agent
        self.done: list[Transfer] = []

    def read(self, slices: int = 1, priority: Priority = Priority.FOREGROUND, *, deadline_s: float = PATIENCE_S) -> Transfer:
        buffer = bytearray(slices * SLICE)
        return self.engine.submit([(self.remote, buffer, len(buffer))], priority=priority, deadline_s=deadline_s, on_done=self.done.append)

    def begun(self) -> list[Transfer]:
        """Of each slice that was begun, in order."""
        return [request.context.transfer for request in self.agent.begun]

    def state(self, transport: str = "faulty") -> PathState:
        [state] = [state for path, state in self.remote.peer.chooser.states.items() if path.transport == transport]
        return state

    def close(self) -> None:
        self.remote.peer.chooser.check_integrity()
        self.engine.close()
        self.other.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_at_most_the_window_of_an_agent_is_under_way(scene: Scene) -> None:
    scene.agent.default = WAIT
    transfer = scene.read(5)
    assert len(scene.agent.under_way) == FaultyAgent.window
    scene.agent.end(scene.agent.under_way[0])
    assert len(scene.agent.under_way) == FaultyAgent.window
    assert not scene.spare.begun, "a path of a preferred transport is waited for"
    scene.agent.default = DELIVER
    scene.agent.end_all()
    assert transfer.is_over
    assert scene.agent.peak == FaultyAgent.window


def test_slices_go_in_order_and_foreground_before_background(scene: Scene) -> None:
    scene.agent.default = WAIT
    background, first, second = scene.read(4, Priority.BACKGROUND), scene.read(2), scene.read(2)
    while scene.agent.under_way:
        scene.agent.end(scene.agent.under_way[0])
    assert scene.begun() == [background, background, first, first, second, second, background, background]
    assert scene.done == [first, second, background]


def test_a_failed_slice_goes_before_those_that_were_not_begun(scene: Scene) -> None:
    scene.agent.default = scene.spare.default = WAIT
    failing, waiting = scene.read(2), scene.read(1)
    scene.agent.end(scene.agent.under_way[0], Answer(Unreachable("down"), 0))
    assert [request.context.transfer for request in scene.spare.under_way] == [failing, waiting]
    scene.spare.end_all()
    scene.agent.end_all()
    assert failing.retries == 1
    assert (scene.state().failed_slices, scene.state("spare").retried_slices) == (1, 1)


def test_a_callers_error_fails_the_transfer_and_cancels_the_rest(scene: Scene) -> None:
    for kind in (Denied, StaleHandle, InvalidArgument, DeadlineExceeded, Cancelled):
        scene.agent.default = WAIT
        scene.done.clear()
        transfer = scene.read(4)
        scene.agent.end(scene.agent.under_way[0], Answer(kind("no"), 0))
        assert scene.done == [transfer]
        assert type(transfer.error) is kind
        assert not scene.agent.under_way
        assert scene.state().failed_slices == 0
        assert not scene.spare.begun


def test_attempts_are_limited_by_transport() -> None:
    scene = Scene(max_attempts=1)
    scene.agent.default = scene.spare.default = Answer(Unreachable("down"), 0)
    assert isinstance(scene.read().error, Unreachable)
    assert (len(scene.agent.begun), len(scene.spare.begun)) == (1, 1)
    scene.close()


def test_a_retried_write_fences_off_what_may_still_arrive(scene: Scene) -> None:
    scene.agent.default = WAIT
    transfer = scene.engine.submit([(b"w" * SLICE, scene.remote, SLICE)])
    [request] = scene.agent.under_way
    request.unsettled = (7,)
    scene.agent.end(request, Answer(Unreachable("down"), 0))
    assert transfer.is_over
    assert [list(request.fences) for request in scene.spare.begun] == [[7]]


def test_a_retried_write_fences_its_agents_attempts(scene: Scene) -> None:
    """An agent retries when another request broke the connection. Here its retry cannot connect."""
    scene.agent.default = scene.spare.default = WAIT
    transfer = scene.engine.submit([(b"w" * SLICE, scene.remote, SLICE)])
    [request] = scene.agent.under_way
    request.fences = (7,)
    scene.agent.end(request, Answer(Unreachable("down"), 0))
    [request] = scene.spare.under_way
    assert request.fences == (7,)
    request.unsettled = (8,)
    scene.agent.default = DELIVER
    scene.spare.end(request, Answer(Unreachable("down"), 0))
    assert transfer.is_over
    assert scene.agent.begun[-1].fences == (7, 8)


def test_an_unsettled_write_needs_an_agent_with_fences(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpareAgent, "honours_fences", False)
    scene.agent.default = WAIT
    transfer = scene.engine.submit([(b"w" * SLICE, scene.remote, SLICE)])
    [request] = scene.agent.under_way
    request.unsettled = (7,)
    scene.agent.default = DELIVER
    scene.agent.end(request, Answer(Unreachable("down"), 0))
    assert (transfer.is_over, transfer.error) == (True, None)
    assert not scene.spare.begun


def test_errors_after_a_failure_do_not_count_for_the_path(scene: Scene) -> None:
    scene.agent.default, scene.agent.ignores_cancel = WAIT, True
    transfer = scene.read(2)
    transfer.cancel()
    first, second = scene.agent.under_way
    scene.agent.end(first, Answer(Unreachable("down"), 0))
    assert not scene.done, "a slice is still under way"
    scene.agent.end(second)
    assert scene.done == [transfer]
    assert isinstance(transfer.error, Cancelled)
    assert (transfer.retries, scene.state().failed_slices) == (0, 0)


def test_an_expired_deadline_fails_the_transfer_at_dispatch(scene: Scene) -> None:
    scene.agent.default = WAIT
    scene.read(3)
    late = scene.read(1, deadline_s=0)
    assert not late.is_over, "nobody waits for it, and others go before it"
    scene.agent.end(scene.agent.under_way[0])
    assert isinstance(late.error, DeadlineExceeded)
    assert late.is_over
    scene.agent.end_all()


def test_cancel_during_submit_takes_effect_afterwards(scene: Scene) -> None:
    """An agent cannot cancel what it has not seen yet (FaultyAgent asserts that)."""
    scene.agent.default = WAIT

    def cancel(request: AgentRequest) -> None:
        request.context.transfer.cancel()

    scene.agent.before_submit = cancel
    transfer = scene.read(2)
    assert scene.done == [transfer]
    assert isinstance(transfer.error, Cancelled)
    assert len(scene.agent.begun) == 2, "both were begun before the first was submitted"


def test_callbacks_may_submit_more(scene: Scene) -> None:
    buffers = [bytearray(SLICE) for _ in range(500)]
    left = list(buffers)

    def next_one(transfer: Transfer) -> None:
        if left:
            scene.engine.submit([(scene.remote, left.pop(), SLICE)], on_done=next_one)

    scene.engine.submit([(scene.remote, left.pop(), SLICE)], on_done=next_one)
    assert all(buffer == scene.region.memory[:SLICE] for buffer in buffers)


@pytest.mark.parametrize("finishes_first", [False, True])
def test_an_agent_that_raises_fails_its_slices_and_no_others(
    finishes_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RaisingAgent, "finishes_first", finishes_first)
    scene = Scene(f"tests.transfer.faulty:RaisingAgent,{FAULTY}")
    transfer = scene.read(4)
    transfer.wait()
    assert "the agent of raising failed to submit a request" in caplog.text
    assert transfer.retries == (0 if finishes_first else 2)
    scene.close()


def test_only_the_first_slice_is_left_for_a_caller_that_waits(scene: Scene) -> None:
    scene.agent.default = WAIT
    runs: list[AgentRequest] = []

    def run(request: AgentRequest) -> None:
        runs.append(request)
        scene.agent.end_all()

    scene.agent.run = run  # type: ignore[method-assign]
    scene.engine.transfer([(scene.remote, bytearray(2 * SLICE), 2 * SLICE)])
    assert [request.caller_runs for request in scene.agent.begun] == [True, False]
    assert runs == [scene.agent.begun[0]], "the second was over by then"


def test_a_slice_of_somebody_else_is_not_left_for_the_caller(scene: Scene) -> None:
    scene.agent.default = WAIT
    other = scene.read(3, Priority.FOREGROUND)
    held = list(scene.agent.under_way)
    scene.agent.run = lambda request: scene.agent.end_all()  # type: ignore[method-assign]
    release = threading.Timer(0, lambda: [scene.agent.end(request) for request in held] and None)
    release.start()
    scene.engine.transfer([(scene.remote, bytearray(SLICE), SLICE)])
    release.join()
    while scene.agent.under_way:
        scene.agent.end_all()
    assert other.is_over
    assert not any(request.caller_runs for request in scene.agent.begun if request.context.transfer is other)
