"""Promises of agent.py; the suites of agents and connections over NIXL. Skipped where NIXL is not installed.

Within one host NIXL copies between processes at once, so what takes time (stalls, cancelling) is tested over TCP.
"""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from kvstore.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    Denied,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unreachable,
)
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.agents import AgentConformance
from kvstore.testing.transfer.awaited import PATIENCE_S, SHORT_S, SOON_S, eventually, within
from kvstore.testing.transfer.peer import AgentPair, PeerProcess, RegionAllocator, ask, outcome, pattern, remote_region, whole
from kvstore.transfer.agent import AgentRequest, Direction, Rail, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Piece, Region
from kvstore.transfer.nixl.agent import NixlAgent
from kvstore.transfer.nixl.library import PACKAGES, NativeAgent, NixlProgress

pytestmark = pytest.mark.skipif(not any(map(importlib.util.find_spec, PACKAGES)), reason="NIXL is not installed")
MIB = 1 << 20


GRACE_S = 2.0
"""Time for an abandoned transfer to end before its peer is cut off: a busy machine moves the conformance suite's 192 MiB in it."""


def make_agent(name: str) -> NixlAgent:
    return NixlAgent(name, Rail(), TransferSettings(stall_timeout_s=GRACE_S))


@pytest.mark.slow  # the same agent over another way of UCX
class TestWithinTheHost(AgentConformance):
    checks_keys = False

    def make_agent(self, name: str) -> TransferAgent:
        return make_agent(name)


class TestOverTcp(AgentConformance):
    checks_keys = False

    @pytest.fixture(autouse=True)
    def over_tcp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")

    def make_agent(self, name: str) -> TransferAgent:
        return make_agent(name)

    @pytest.mark.parametrize("direction", [Direction.WRITE])
    def test_a_stalled_peer_is_given_up_and_memory_left_alone(self, pair: AgentPair, peer: PeerProcess, direction: Direction) -> None:
        """Not for reads: UCX 1.21 ends the whole process of a peer when the reader closes before its reply (docs/transfer.md)."""
        super().test_a_stalled_peer_is_given_up_and_memory_left_alone(pair, peer, direction)

    def test_a_request_past_its_deadline_fails_the_others(self, pair: AgentPair, peer: PeerProcess) -> None:
        _, pieces = whole(pair, peer)
        pair.move(Direction.WRITE, *pieces)
        with peer.stopped(), within(SHORT_S):
            short, long = (ask(pair.user, Direction.WRITE, pair.remote, pieces, timeout_s=s) for s in (SHORT_S, PATIENCE_S))
            assert isinstance(outcome(short), DeadlineExceeded)
            assert isinstance(outcome(long), Unreachable)
        self.succeeds_again(pair, *pieces)

    def test_run_ends_at_the_deadline(self, pair: AgentPair, peer: PeerProcess) -> None:
        ours, pieces = whole(pair, peer)
        with peer.stopped(), within(SHORT_S):
            request = ask(pair.user, Direction.WRITE, pair.remote, pieces, timeout_s=SHORT_S)
            pair.user.run(request)
            assert isinstance(outcome(request), DeadlineExceeded)
        eventually(lambda: ours.users == 0, "the region is released")

    def test_cancelling_cuts_off_what_does_not_end(self, pair: AgentPair, peer: PeerProcess) -> None:
        _, pieces = whole(pair, peer)
        with peer.stopped(), within(SHORT_S):
            request = ask(pair.user, Direction.WRITE, pair.remote, pieces)
            assert not request.is_over
            pair.user.cancel(request)
            assert isinstance(outcome(request), Cancelled)

    def test_unloading_a_peer_ends_its_requests(self, pair: AgentPair, peer: PeerProcess) -> None:
        _, pieces = whole(pair, peer)
        with peer.stopped(), within(SOON_S):
            request = ask(pair.user, Direction.WRITE, pair.remote, pieces)
            pair.user.unload_remote(pair.remote)
            assert isinstance(outcome(request), Unreachable)

    def test_an_interrupted_caller_hands_its_request_to_the_thread(
        self, pair: AgentPair, peer: PeerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, pieces = whole(pair, peer)
        with peer.stopped():
            request = ask(pair.user, Direction.WRITE, pair.remote, pieces)
            with monkeypatch.context() as patched:
                patched.setattr(NativeAgent, "progress", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    pair.user.run(request)
        assert outcome(request) is None

    def test_a_connection_that_breaks_ends_all_of_its_requests(self, pair: AgentPair, peer: PeerProcess) -> None:
        _, pieces = whole(pair, peer)
        pair.move(Direction.WRITE, *pieces)
        with peer.stopped():
            requests = [ask(pair.user, Direction.WRITE, pair.remote, pieces) for _ in range(3)]
            peer.kill()
        assert all(isinstance(outcome(request), Unreachable) for request in requests)

    def test_a_notification_that_fails_cuts_off_no_requests(
        self, pair: AgentPair, peer: PeerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, pieces = whole(pair, peer)
        with peer.stopped(), monkeypatch.context() as patched:
            request = ask(pair.user, Direction.WRITE, pair.remote, pieces)
            patched.setattr(NativeAgent, "notify", unreachable)
            with pytest.raises(Unreachable):
                pair.user.notify(pair.remote, b"lost", Deadline(SOON_S))
        assert outcome(request) is None


@pytest.fixture
def pair() -> Iterator[AgentPair]:
    with RegionAllocator() as memory:
        owner, user = make_agent("owner"), make_agent("user")
        yield AgentPair(owner, user, memory)
        user.close()
        owner.close()


def interrupted(*_: Any) -> NixlProgress:
    raise KeyboardInterrupt


def unreachable(*_: Any) -> None:
    raise Unreachable("injected")


def raised_by(act: Callable[[], object]) -> KVStoreError | None:
    try:
        act()
    except KVStoreError as error:
        return error
    return None


def test_a_key_lets_do_what_it_is_for_and_nothing_else(pair: AgentPair) -> None:
    theirs, ours, described = pair.regions(4096)
    reader = described._replace(key=theirs.read_key)
    pair.move(Direction.READ, Piece(ours, 0, reader, 0, 4096))
    assert ours.memory == pattern(1, 4096)
    ours.memory[:] = pattern(2, 4096)
    for key in (reader.key, described.key ^ 1):
        error = pair.failure(Direction.WRITE, Piece(ours, 0, described._replace(key=key), 0, 4096))
        assert isinstance(error, Denied)
    assert theirs.memory == pattern(1, 4096)


def test_a_region_of_an_earlier_agent_of_the_peer_is_stale(pair: AgentPair) -> None:
    theirs, ours, described = pair.regions(4096)
    again = make_agent("owner")
    try:
        remote = pair.user.load_remote(again.metadata())
        assert isinstance(outcome(ask(pair.user, Direction.READ, remote, [Piece(ours, 0, described, 0, 4096)])), StaleHandle)
        assert outcome(ask(pair.user, Direction.READ, remote, [Piece(ours, 0, remote_region(again, theirs), 0, 4096)])) is None
    finally:
        again.close()


def test_a_foreign_description_is_refused(pair: AgentPair) -> None:
    theirs, ours, described = pair.regions(4096)
    descriptor = described.descriptors["nixl"]
    broken = described._replace(descriptors={"nixl": descriptor.partition(b"nixlSerDes")[0] + b"not NIXL's"})
    assert isinstance(pair.failure(Direction.READ, Piece(ours, 0, broken, 0, 4096)), ProtocolError)
    pair.move(Direction.READ, Piece(ours, 0, described, 0, 4096))
    assert ours.memory == theirs.memory


def test_of_a_peers_regions_no_more_are_kept_than_may_be(pair: AgentPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.transfer.nixl.agent.MAX_KNOWN_REGIONS", 4)
    user, owner = pair.user, pair.owner
    assert isinstance(user, NixlAgent)
    for number in range(20):
        memory = bytearray(64)
        theirs, mine = Region(memoryview(memory)), Region(memoryview(bytearray([number]) * 64))
        pair.move(Direction.WRITE, Piece(mine, 0, remote_region(owner, theirs), 0, 64))
        assert memory == bytes([number]) * 64
        assert sum(map(len, user._known.values())) <= 4
        for region in (theirs, mine):
            region.close()


def test_plain_buffers_are_deregistered_after_the_read() -> None:
    settings = TransferSettings(transports="nixl")
    with TransferEngine("reader", settings) as reader, TransferEngine("owner", settings) as owner:
        with closing(owner.register(bytearray(b"theirs"))) as region:
            remote = reader.import_region(reader.connect(owner.describe()), owner.export(region))
            for _ in range(20):
                buffer = bytearray(6)
                reader.transfer([(remote, buffer, 6)])
                assert buffer == b"theirs"
            [agent] = reader.agents
            assert isinstance(agent, NixlAgent)
            assert not agent._watched
            assert not any(agent._registered.values())


def test_memory_is_registered_anew_for_a_new_region(pair: AgentPair) -> None:
    """Regions are registered and closed at one address, with transfers in between."""
    first, ours, described = pair.regions(4096)
    pair.move(Direction.READ, Piece(ours, 0, described, 0, 4096))
    pair.user.export(ours)
    first.close()
    ours.close()
    for _ in range(3):
        theirs, mine = Region(first.memory), Region(ours.memory)
        mine.memory[:] = bytes(4096)
        pair.move(Direction.READ, Piece(mine, 0, remote_region(pair.owner, theirs), 0, 4096))
        assert mine.memory == pattern(1, 4096)
        theirs.close()
        mine.close()


def test_a_region_may_outlive_its_agent() -> None:
    region, agent = Region(memoryview(bytearray(4096))), make_agent("short-lived")
    agent.export(region)
    agent.close()
    region.close()
    region = Region(memoryview(bytearray(4096)))
    agent = make_agent("forgotten")
    agent.export(region)
    del agent
    region.close()


def test_notify_fails_until_the_peer_is_back(pair: AgentPair) -> None:
    pair.user.notify(pair.remote, b"hello", Deadline(PATIENCE_S))
    pair.owner.close()

    def is_noticed() -> bool:
        return isinstance(raised_by(lambda: pair.user.notify(pair.remote, b"lost", Deadline(SOON_S))), Unreachable)

    eventually(is_noticed, "the notification fails")
    assert is_noticed()


@pytest.mark.parametrize("call", ["post", "progress"])
def test_an_unexplained_failure_is_unreachable_and_transient(pair: AgentPair, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Injected: which of a transfer's operations go on is not known then, so the connections are given up."""
    theirs, ours, described = pair.regions(4096)
    with monkeypatch.context() as patched:
        patched.setattr(NativeAgent, "post", lambda *_: NixlProgress.UNDER_WAY)
        patched.setattr(NativeAgent, call, lambda *_: NixlProgress.FAILED)
        assert isinstance(pair.failure(Direction.READ, Piece(ours, 0, described, 0, 4096)), Unreachable)
    pair.move(Direction.READ, Piece(ours, 0, described, 0, 4096))
    assert ours.memory == theirs.memory


def test_a_handle_that_nixl_gives_out_again_is_another_transfers(pair: AgentPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected: the second transfer gets the handle of the first while the agent's thread sleeps before it looks after the first."""
    _, ours, described = pair.regions(4096)
    progress, polls = NixlProgress.UNDER_WAY, threading.Semaphore(0)

    def look(*_: Any) -> NixlProgress:
        polls.release()
        return progress

    monkeypatch.setattr(NativeAgent, "prepare", lambda *_: 7)
    monkeypatch.setattr(NativeAgent, "post", lambda *_: NixlProgress.UNDER_WAY)
    monkeypatch.setattr(NativeAgent, "progress", look)
    monkeypatch.setattr(NativeAgent, "release", lambda *_: None)
    for pause in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"kvstore.transfer.nixl.agent.{pause}", 0.1)
    first = ask(pair.user, Direction.READ, pair.remote, [Piece(ours, 0, described, 0, 4096)])
    assert polls.acquire(timeout=PATIENCE_S)
    progress = NixlProgress.DONE
    pair.user.run(first)
    second = ask(pair.user, Direction.READ, pair.remote, [Piece(ours, 0, described, 0, 4096)])
    assert outcome(second) is None
    assert (first.finish_count, second.finish_count) == (1, 1)


def test_a_caller_that_runs_its_request_needs_no_thread(pair: AgentPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected: a transfer that takes many looks."""
    _, ours, described = pair.regions(4096)
    polls = iter([NixlProgress.UNDER_WAY] * 20 + [NixlProgress.DONE])
    monkeypatch.setattr(NativeAgent, "post", lambda *_: NixlProgress.UNDER_WAY)
    monkeypatch.setattr(NativeAgent, "progress", lambda *_: next(polls))
    before = threading.active_count()
    request = AgentRequest(Direction.READ, pair.remote, [Piece(ours, 0, described, 0, 4096)], Deadline(PATIENCE_S), caller_runs=True)
    pair.user.submit(request)
    pair.user.run(request)
    assert (request.is_over, request.error, next(polls, None)) == (True, None, None)
    assert threading.active_count() == before


def test_without_a_polling_thread_nothing_moves(pair: AgentPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    _, ours, described = pair.regions(4096)
    pieces = [Piece(ours, 0, described, 0, 4096)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert isinstance(outcome(ask(pair.user, Direction.READ, pair.remote, pieces)), Unreachable)
        patch.setattr(NativeAgent, "post", lambda *_: NixlProgress.UNDER_WAY)
        request = AgentRequest(Direction.READ, pair.remote, pieces, Deadline(PATIENCE_S), caller_runs=True)
        pair.user.submit(request)
        pair.user.cancel(request)
        assert isinstance(outcome(request), Unreachable)
    assert outcome(ask(pair.user, Direction.READ, pair.remote, pieces)) is None


def test_a_callback_may_use_and_close_its_agent(pair: AgentPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the agent's own thread, which cannot wait for itself."""
    _, ours, described = pair.regions(4096)
    closed = threading.Event()

    def close(request: AgentRequest) -> None:
        pair.user.notifications()
        pair.user.close()
        closed.set()

    monkeypatch.setattr(NativeAgent, "post", lambda *_: NixlProgress.UNDER_WAY)
    pair.user.submit(AgentRequest(Direction.READ, pair.remote, [Piece(ours, 0, described, 0, 4096)], Deadline(PATIENCE_S), close))
    assert closed.wait(PATIENCE_S)


def test_the_interpreter_ends_cleanly_with_agents_open() -> None:
    program = (
        "from kvstore.transfer.agent import *; from kvstore.transfer.nixl.agent import *; from kvstore.transfer.config import *; "
        "a, b = (NixlAgent(name, Rail(), TransferSettings()) for name in 'ab'); "
        "a.notify(a.load_remote(b.metadata()), b'', Deadline(9))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False).returncode == 0
