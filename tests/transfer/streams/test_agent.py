"""An agent over TCP connections: which connections it keeps, how it shares them, and what becomes of requests when they break."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from kvstore.protocol.errors import (
    Cancelled,
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    Unreachable,
)
from kvstore.protocol.transfers import MAX_PIECE_BYTES, MAX_PIECES
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.agents import AgentConformance
from kvstore.testing.transfer.awaited import PATIENCE_S, SHORT_S, SOON_S, eventually, in_background, is_quiet, within
from kvstore.testing.transfer.peer import move
from kvstore.transfer.agent import AgentRequest, Direction, Rail, Remote, TransferAgent
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.region import Exports, Piece, Region, RemoteRegion
from kvstore.transfer.streams.agent import ConnectionAgent
from kvstore.transfer.streams.request_stream import RequestStream
from kvstore.transfer.streams.target import Target
from kvstore.transfer.streams.tcp import TcpConnection
from tests.rpc.raw_peers import Proxy, RawAnswerer, an_agent, make_region, outcome, read_request, shown, submit, welcome

SIZE = 64 << 10
CLOSE_S = SOON_S
READ, WRITE = Direction.READ, Direction.WRITE


class TestTcpAgent(AgentConformance):
    def make_agent(self, name: str) -> TransferAgent:
        return ConnectionAgent(name, Rail(), TransferSettings(), TcpConnection)


@pytest.fixture
def owner() -> Iterator[ConnectionAgent]:
    with an_agent("owner", stall_timeout_s=PATIENCE_S) as owner:
        yield owner


@pytest.fixture
def theirs(owner: ConnectionAgent) -> Region:
    region = make_region(SIZE, b"theirs")
    owner.export(region)
    return region


@pytest.fixture
def remote_region(theirs: Region) -> RemoteRegion:
    return shown(theirs)


@pytest.fixture
def stalled() -> Iterator[RawAnswerer]:
    """A peer that joins, and reads requests without answering."""

    def play(sock: socket.socket) -> None:
        welcome(sock)
        while True:
            read_request(sock)

    with RawAnswerer(play) as stalled:
        yield stalled


def all_of(remote_region: RemoteRegion) -> list[Piece]:
    return [Piece(make_region(SIZE), 0, remote_region, 0, SIZE)]


def test_a_lane_whose_runner_could_not_be_started_is_run_once(
    owner: ConnectionAgent, remote_region: RemoteRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that cannot start a thread keeps what it was given: two threads would read one connection."""
    with an_agent(tcp_streams=1) as agent:
        may_go, runs = threading.Event(), list[str]()
        agent._runners.submit(may_go.wait)
        run = agent._run

        def noted(stream: RequestStream) -> None:
            runs.append(threading.current_thread().name)
            run(stream)

        monkeypatch.setattr(agent, "_run", noted)
        remote = agent.load_remote(owner.metadata())
        with no_thread_for("kvstore-tcp"):
            assert outcome(submit(agent, READ, remote, all_of(remote_region))) is None
        may_go.set()
        agent.close()
        assert runs == [threading.current_thread().name]


@contextmanager
def no_thread_for(name: str) -> Iterator[None]:
    """The system has none for threads of this name."""
    start = threading.Thread.start

    def start_another(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_another)
        yield


def read_once(agent: ConnectionAgent, remote: Remote, remote_region: RemoteRegion) -> None:
    pieces = all_of(remote_region)
    move(agent, READ, remote, pieces)
    assert pieces[0].local.memory == make_region(SIZE, b"theirs").memory


# --- connections ---


def test_threads_share_few_endpoints_without_starvation(owner: ConnectionAgent, remote_region: RemoteRegion) -> None:
    with an_agent(max_endpoints=4, tcp_streams=1) as agent:
        remotes = [agent.load_remote(owner.metadata()) for _ in range(40)]
        most = [0] * 8

        def ask(thread: int) -> None:
            for number in range(40):
                read_once(agent, remotes[(number * 7 + thread * 5) % 40], remote_region)
                most[thread] = max(most[thread], agent._pool.open_count)

        asking = [in_background(partial(ask, thread)) for thread in range(8)]
        for future in asking:
            future.result(PATIENCE_S)
        assert max(most) <= 4
        agent._pool.check_integrity()


def test_endless_work_for_one_peer_makes_room_for_another(owner: ConnectionAgent, remote_region: RemoteRegion) -> None:
    with an_agent(max_endpoints=1, tcp_streams=1) as agent:
        busy, other = (agent.load_remote(owner.metadata()) for _ in range(2))
        is_enough = threading.Event()

        def again(request: AgentRequest | None = None) -> None:
            if not is_enough.is_set():
                agent.submit(AgentRequest(READ, busy, all_of(remote_region), Deadline(PATIENCE_S), again))

        for _ in range(3):
            again()
        read_once(agent, other, remote_region)
        is_enough.set()


def test_idle_connections_are_closed_and_reopened(owner: ConnectionAgent, remote_region: RemoteRegion) -> None:
    with an_agent(idle_ttl_s=0.1) as agent:
        remote = agent.load_remote(owner.metadata())
        for _ in range(2):
            read_once(agent, remote, remote_region)
            assert agent._pool.open_count == 1
            eventually(lambda: agent._pool.open_count == 0, "it is idle for too long")
        eventually(lambda: owner._target.connections == 0, "the peer has none either")


def test_a_peer_that_started_anew_is_asked_without_an_error(remote_region: RemoteRegion) -> None:
    """The connection that was kept is dead, which shows only when it is used."""
    exports, region = Exports(), make_region(SIZE, b"theirs")
    exports.add(region)
    old = ConnectionAgent("owner", Rail(), TransferSettings(), TcpConnection, exports=exports)
    port = int(old.metadata().rpartition(b":")[2])
    with an_agent(tcp_streams=1) as agent:
        remote = agent.load_remote(old.metadata())
        read_once(agent, remote, shown(region))
        old.close()
        new = ConnectionAgent("owner", Rail(port=port), TransferSettings(), TcpConnection, exports=exports)
        read_once(agent, remote, shown(region))
        assert agent._pool.open_count == 1
        new.close()


def test_a_silent_peer_is_unreachable_before_the_deadline() -> None:
    def play(sock: socket.socket) -> None:
        read_request(sock)
        sock.recv(1)

    with RawAnswerer(play) as silent:
        with an_agent(connect_timeout_s=SHORT_S) as agent, within(SHORT_S):
            region = shown(make_region(SIZE))
            assert isinstance(outcome(submit(agent, READ, agent.load_remote(silent.metadata), all_of(region))), Unreachable)
            assert isinstance(
                outcome(submit(agent, READ, agent.load_remote(silent.metadata), all_of(region), timeout_s=SHORT_S / 2)), DeadlineExceeded
            )
            assert agent._pool.open_count == 0


def test_close_removes_the_listener_of_a_shared_target(theirs: Region, remote_region: RemoteRegion) -> None:
    exports = Exports()
    exports.add(theirs)
    target = Target("owner", exports, TransferSettings())
    one, other = (ConnectionAgent("owner", Rail(), TransferSettings(), TcpConnection, exports=exports, target=target) for _ in range(2))
    with an_agent() as agent:
        remote, gone = agent.load_remote(other.metadata()), agent.load_remote(one.metadata())
        one.close()
        read_once(agent, remote, remote_region)
        assert isinstance(outcome(submit(agent, READ, gone, all_of(remote_region))), Unreachable)
        other.close()
        target.close()


# --- requests ---


@pytest.mark.parametrize(
    ("count", "size", "reach"), [(MAX_PIECES + 1, 0, 1), (5, MAX_PIECE_BYTES, 1), (1, MAX_PIECE_BYTES + 1, 1), (1, 1, 0)]
)
def test_a_request_over_a_limit_is_refused_at_once(owner: ConnectionAgent, count: int, size: int, reach: int) -> None:
    region = make_region(1)
    remote = owner.load_remote(owner.metadata())
    pieces = [Piece(region, 0, RemoteRegion(1, reach * (size + 1), 0, {}), 0, size)] * count
    assert isinstance(outcome(submit(owner, READ, remote, pieces)), InvalidArgument)
    assert owner._pool.open_count == 0


def test_cancelling_one_request_leaves_the_others_right(owner: ConnectionAgent, remote_region: RemoteRegion) -> None:
    """Also those on the same connection, which has to be closed for it."""
    # Join takes 41 bytes and a write 160: the proxy stops in the middle of the fifth.
    with Proxy(owner.metadata(), limit_bytes=41 + 4 * 160 + 80) as proxy, an_agent(tcp_streams=1, stall_timeout_s=PATIENCE_S) as agent:
        remote = agent.load_remote(proxy.metadata)
        parts = [[Piece(make_region(100, bytes([number])), 0, remote_region, number * 100, 100)] for number in range(8)]
        requests = [submit(agent, WRITE, remote, part) for part in parts]
        assert proxy.held.wait(PATIENCE_S)
        proxy.lift()
        agent.cancel(requests[4])
        agent.cancel(requests[4])
        results = [outcome(request) for request in requests]
        assert isinstance(results.pop(4), Cancelled)
        assert results == [None] * 7
        ours = make_region(800)
        move(agent, READ, remote, [Piece(ours, 0, remote_region, 0, 800)])
        for number in (0, 1, 2, 3, 5, 6, 7):
            assert bytes(ours.memory[number * 100 : number * 100 + 100]) == bytes([number]) * 100


def test_cancel_frees_a_thread_waiting_for_an_endpoint(stalled: RawAnswerer, remote_region: RemoteRegion) -> None:
    with an_agent(max_endpoints=1, tcp_streams=1, stall_timeout_s=PATIENCE_S) as agent:
        busy, other = (agent.load_remote(stalled.metadata) for _ in range(2))
        holding = submit(agent, READ, busy, all_of(remote_region))
        eventually(lambda: agent._pool.open_count == 1, "the endpoint is in use")
        request = AgentRequest(READ, other, all_of(remote_region), Deadline(PATIENCE_S), caller_runs=True)
        agent.submit(request)
        waiting = in_background(lambda: agent.run(request))
        assert is_quiet(waiting)
        agent.cancel(request)
        waiting.result(CLOSE_S)
        assert isinstance(request.error, Cancelled)
        agent.cancel(holding)
        assert isinstance(outcome(holding), Cancelled)


def test_waiting_for_an_endpoint_ends_at_the_deadline(stalled: RawAnswerer, remote_region: RemoteRegion) -> None:
    with an_agent(max_endpoints=1, tcp_streams=1, stall_timeout_s=PATIENCE_S) as agent:
        busy, other = (agent.load_remote(stalled.metadata) for _ in range(2))
        submit(agent, READ, busy, all_of(remote_region))
        eventually(lambda: agent._pool.open_count == 1, "the endpoint is in use")
        with within(SHORT_S):
            assert isinstance(outcome(submit(agent, READ, other, all_of(remote_region), timeout_s=SHORT_S)), DeadlineExceeded)


def test_without_threads_of_its_own_the_submitters_does_the_work(owner: ConnectionAgent, remote_region: RemoteRegion) -> None:
    """As when the system has no more, or the agent is being closed."""
    owner._runners.shutdown()
    request = submit(owner, READ, owner.load_remote(owner.metadata()), all_of(remote_region))
    assert request.is_over
    assert request.error is None


def test_a_waiting_thread_hands_on_what_is_not_its_own(owner: ConnectionAgent, remote_region: RemoteRegion) -> None:
    with an_agent(tcp_streams=1) as agent:
        remote = agent.load_remote(owner.metadata())
        mine = AgentRequest(READ, remote, all_of(remote_region), Deadline(PATIENCE_S), caller_runs=True)
        agent.submit(mine)
        others = [AgentRequest(READ, remote, all_of(remote_region), Deadline(PATIENCE_S), caller_runs=True) for _ in range(50)]
        for request in others:
            agent.submit(request)
        agent.run(mine)
        assert mine.is_over
        assert [outcome(request) for request in others] == [None] * 50


def test_a_waiting_thread_is_not_kept_by_requests_of_others(stalled: RawAnswerer, remote_region: RemoteRegion) -> None:
    """They are before its own, their deadline is far away, and their peer does not answer."""
    with an_agent(tcp_streams=1, stall_timeout_s=PATIENCE_S) as agent:
        remote = agent.load_remote(stalled.metadata)
        other, mine = (AgentRequest(READ, remote, all_of(remote_region), Deadline(PATIENCE_S), caller_runs=True) for _ in range(2))
        agent.submit(other)
        agent.submit(mine)
        in_background(lambda: agent.run(mine)).result(SOON_S)
        assert not other.is_over
        for request in (mine, other):
            agent.cancel(request)
            assert isinstance(outcome(request), Cancelled)


class Interrupted(TcpConnection):
    """The first time that it is used after the join, this happens."""

    error: BaseException | None = None

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        error, Interrupted.error = Interrupted.error, None
        if error is not None:
            raise error
        super().send(parts, deadline)


def test_an_interrupted_thread_leaves_its_requests_to_others(owner: ConnectionAgent, remote_region: RemoteRegion) -> None:
    with an_agent(connection_class=Interrupted, tcp_streams=1) as agent:
        remote = agent.load_remote(owner.metadata())
        requests = [AgentRequest(READ, remote, all_of(remote_region), Deadline(PATIENCE_S), caller_runs=True) for _ in range(2)]
        for request in requests:
            agent.submit(request)
        Interrupted.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            agent.run(requests[0])
        assert [outcome(request) for request in requests] == [None, None]


def test_a_transport_at_fault_is_unreachable(owner: ConnectionAgent, remote_region: RemoteRegion, caplog: pytest.LogCaptureFixture) -> None:
    with an_agent(connection_class=Interrupted, tcp_streams=1) as agent:
        remote = agent.load_remote(owner.metadata())
        Interrupted.error = ValueError("a fault")
        assert isinstance(outcome(submit(agent, READ, remote, all_of(remote_region))), Unreachable)
        read_once(agent, remote, remote_region)
    assert "a fault" in caplog.text


# --- fencing ---


@pytest.mark.parametrize("is_fenced", [True, False], ids=["fenced", "not fenced, to show that there is something to fence"])
def test_late_bytes_of_a_write_that_was_tried_again_never_land(
    owner: ConnectionAgent, theirs: Region, remote_region: RemoteRegion, is_fenced: bool
) -> None:
    """The first way stalls with half of the write in it, the second one works; what is written afterwards stays."""
    with Proxy(owner.metadata(), limit_bytes=SIZE // 2) as proxy, an_agent(tcp_streams=1, stall_timeout_s=SHORT_S) as agent:
        bad, good = agent.load_remote(proxy.metadata), agent.load_remote(owner.metadata())
        pieces = [Piece(make_region(SIZE, b"first"), 0, remote_region, 0, SIZE)]
        stuck = submit(agent, WRITE, bad, pieces)
        assert isinstance(outcome(stuck), Unreachable)
        assert len(stuck.unsettled) == 1
        assert proxy.held.is_set()
        again = submit(agent, WRITE, good, pieces, fences=stuck.unsettled if is_fenced else ())
        assert outcome(again) is None
        assert theirs.memory == pieces[0].local.memory
        assert (theirs.users == 0) is is_fenced
        later = [Piece(make_region(SIZE, b"later"), 0, remote_region, 0, SIZE)]
        assert outcome(submit(agent, WRITE, good, later)) is None
        proxy.release()
        assert proxy.passed.wait(PATIENCE_S)
        eventually(lambda: theirs.users == 0, "nothing comes any more")
        assert (theirs.memory == later[0].local.memory) is is_fenced


# --- notifications, forgetting, the end ---


def test_notify_to_a_blocked_peer_ends_at_the_deadline(stalled: RawAnswerer) -> None:
    with an_agent(stall_timeout_s=PATIENCE_S) as agent:
        with within(SHORT_S), pytest.raises(DeadlineExceeded):
            agent.notify(agent.load_remote(stalled.metadata), b"hello", Deadline(SHORT_S))


def test_a_forgotten_peer_ends_what_was_asked_of_it(owner: ConnectionAgent, stalled: RawAnswerer, remote_region: RemoteRegion) -> None:
    with an_agent(tcp_streams=1, stall_timeout_s=PATIENCE_S) as agent:
        remote, other = agent.load_remote(stalled.metadata), agent.load_remote(owner.metadata())
        requests = [submit(agent, READ, remote, all_of(remote_region)) for _ in range(8)]
        read_once(agent, other, remote_region)
        eventually(lambda: agent._pool.open_count == 2, "it is being asked")
        agent.unload_remote(remote)
        agent.unload_remote(remote)
        assert [type(outcome(request)) for request in requests] == [Unreachable] * 8
        assert isinstance(outcome(submit(agent, READ, remote, all_of(remote_region))), Unreachable)
        agent.unload_remote(other)
        eventually(lambda: agent._pool.open_count == 0, "both are forgotten")


@pytest.mark.parametrize("end", ["close", "unload"])
def test_what_is_about_to_connect_ends_too(end: str, remote_region: RemoteRegion) -> None:
    joining = threading.Event()

    def play(sock: socket.socket) -> None:
        read_request(sock)
        joining.set()
        read_request(sock)

    with RawAnswerer(play) as silent, an_agent(connect_timeout_s=PATIENCE_S, stall_timeout_s=PATIENCE_S) as agent:
        remote = agent.load_remote(silent.metadata)
        request = submit(agent, READ, remote, all_of(remote_region))
        assert joining.wait(PATIENCE_S)
        in_background(agent.close if end == "close" else partial(agent.unload_remote, remote)).result(CLOSE_S)
        assert type(outcome(request)) is (Closed if end == "close" else Unreachable)


class Late(TcpConnection):
    """Connects only when it is let."""

    began, go_on = threading.Event(), threading.Event()

    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> TcpConnection:
        cls.began.set()
        assert cls.go_on.wait(PATIENCE_S)
        return super().connect(metadata, rail, deadline)


@pytest.mark.parametrize("end", ["close", "unload"])
def test_a_connection_that_comes_too_late_is_not_used(owner: ConnectionAgent, remote_region: RemoteRegion, end: str) -> None:
    Late.began.clear()
    Late.go_on.clear()
    with an_agent(connection_class=Late) as agent:
        remote = agent.load_remote(owner.metadata())
        request = submit(agent, READ, remote, all_of(remote_region))
        assert Late.began.wait(PATIENCE_S)
        ending = in_background(agent.close if end == "close" else partial(agent.unload_remote, remote))
        eventually(lambda: agent._closed or not remote.is_loaded, "it is ended")
        Late.go_on.set()
        ending.result(CLOSE_S)
        assert type(outcome(request)) is (Closed if end == "close" else Unreachable)
        assert agent._pool.open_count == 0
    eventually(lambda: owner._target.connections == 0, "it was hung up")


def test_close_ends_everything_quickly(owner: ConnectionAgent, stalled: RawAnswerer, remote_region: RemoteRegion) -> None:
    """Requests in flight, queued, waiting for an endpoint, and not yet run by their caller."""
    with an_agent(max_endpoints=2, tcp_streams=1, stall_timeout_s=PATIENCE_S) as agent:
        remotes = [agent.load_remote(stalled.metadata) for _ in range(3)]
        requests = [submit(agent, READ, remote, all_of(remote_region)) for remote in remotes for _ in range(5)]
        idle = AgentRequest(READ, agent.load_remote(owner.metadata()), all_of(remote_region), Deadline(PATIENCE_S), caller_runs=True)
        agent.submit(idle)
        eventually(lambda: agent._pool.open_count == 2, "all endpoints are in use")
        in_background(agent.close).result(CLOSE_S)
        assert [type(outcome(request)) for request in [*requests, idle]] == [Closed] * 16
        agent.run(idle)
        with pytest.raises(Closed):
            agent.notify(remotes[0], b"", Deadline(PATIENCE_S))
        assert isinstance(outcome(submit(agent, READ, remotes[0], all_of(remote_region))), Closed)
