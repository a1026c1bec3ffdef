"""Tests of control_limits.py: who gets a thread, with calls that the test ends; connections, with sockets of this process. With gRPC's:
test_callers.py, test_control_service.py."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.control_limits import MAX_WAITING, CallExecutor, UnauthenticatedConnections
from kvstore.protocol.errors import Full
from kvstore.security.identity import ANONYMOUS, UNAUTHENTICATED, Identity, IdentityKind, Role
from tests.no_threads import no_more_threads

RED, BLUE, GREEN = (Identity(IdentityKind.TENANT, Role.READ, name) for name in ("red", "blue", "green"))
NODE = Identity(IdentityKind.NODE, name="n1")
TIMEOUT_S = 30.0


class Threads:
    """In place of an executor's threads: calls run until the test ends them."""

    def __init__(self, executor: CallExecutor) -> None:
        executor._threads.shutdown(wait=True)
        executor._threads = self  # type: ignore[assignment]
        self._running: list[tuple[str, Callable[[], None]]] = []

    def submit(self, run: Callable[..., None], caller: Any, call: Callable[[], str]) -> None:
        self._running.append((call(), lambda: run(caller, lambda: None)))

    @property
    def running(self) -> list[str]:
        return [name for name, _ in self._running]

    def end(self, name: str) -> None:
        self._running.pop(self.running.index(name))[1]()


def executor_of(threads: int) -> tuple[CallExecutor, Threads]:
    executor = CallExecutor(threads)
    return executor, Threads(executor)


def submit(executor: CallExecutor, identity: Identity, *names: str, joins: bool = False) -> None:
    for name in names:
        executor.submit(identity, lambda name=name: name, joins=joins)  # type: ignore[misc]


@pytest.mark.promise("peers-vanish")
def test_each_caller_has_its_share_of_threads() -> None:
    executor, threads = executor_of(8)
    submit(executor, RED, *(f"r{number}" for number in range(9)))
    assert threads.running == ["r0", "r1", "r2", "r3"], "half"
    submit(executor, UNAUTHENTICATED, "s0", "s1", "s2")
    assert threads.running[4:] == ["s0", "s1"], "a quarter"
    submit(executor, BLUE, "b0")
    submit(executor, NODE, "n0", "n1", "n2")
    assert threads.running[6:] == ["n0", "n1"], "a quarter is left for nodes"
    threads.end("s0")
    assert threads.running[-1] == "s2"
    threads.end("s1")
    assert threads.running[-1] == "b0", "the threads that nodes took of theirs do not count"
    threads.end("n0")
    assert threads.running[-1] == "n2"


def test_callers_take_turns() -> None:
    executor, threads = executor_of(2)
    submit(executor, RED, "r0", "r1", "r2")
    submit(executor, BLUE, "b0", "b1")
    submit(executor, GREEN, "g0")
    for ended, begun in (("r0", "r1"), ("r1", "b0"), ("b0", "g0"), ("g0", "r2"), ("r2", "b1")):
        threads.end(ended)
        assert threads.running == [begun]


def test_without_authentication_joins_have_a_quarter() -> None:
    executor, threads = executor_of(8)
    submit(executor, ANONYMOUS, *"abcdefghi")
    submit(executor, ANONYMOUS, "node", joins=True)
    assert threads.running == [*"abcdef", "node"]


def test_calls_of_one_caller_that_wait_are_bounded() -> None:
    executor, _ = executor_of(1)
    submit(executor, RED, *("r" for _ in range(MAX_WAITING + 1)))
    with pytest.raises(Full, match="1024 control calls of this caller are queued"):
        submit(executor, RED, "one more")
    submit(executor, BLUE, "b")


@given(st.integers(1, 9), st.lists(st.sampled_from([RED, BLUE, UNAUTHENTICATED, NODE, None]), max_size=60))
def test_all_calls_run_once_on_no_more_threads_than_there_are(count: int, steps: list[Identity | None]) -> None:
    executor, threads = executor_of(count)
    begun = list[str]()
    added = 0
    for step in [*steps, *[None] * 200]:
        if step is not None:
            submit(executor, step, str(added))
            added += 1
        elif threads.running:
            begun.append(threads.running[0])
            threads.end(threads.running[0])
        assert len(threads.running) <= count
    assert sorted(begun, key=int) == [str(number) for number in range(added)]
    assert not executor._queues


class HeldCall:
    """Waits for its peer until it is cancelled."""

    def __init__(self, executor: CallExecutor, timeout_s: float = 5.0) -> None:
        self._executor, self._timeout_s = executor, timeout_s
        self._may_end, self.began, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> None:
        with self._executor.waiting_for(self, self._timeout_s):
            self.began.set()
            assert self._may_end.wait(TIMEOUT_S)
        self.ended.set()

    def cancel(self) -> None:
        self._may_end.set()


@pytest.mark.promise("peers-vanish")
def test_calls_whose_peers_take_too_long_are_cancelled() -> None:
    now_s = 0.0
    executor = CallExecutor(8, clock_s=lambda: now_s)
    calls = [HeldCall(executor, timeout_s) for timeout_s in (5.0, 6.0)]
    for call in calls:
        executor.submit(NODE, call, joins=False)
        assert call.began.wait(TIMEOUT_S)
    now_s = 4.9
    assert executor.expire() == 0
    now_s = 5.0
    assert executor.expire() == 1
    assert calls[0].ended.wait(TIMEOUT_S)
    assert not calls[1].ended.is_set()
    now_s = 99.0
    assert executor.expire() == 1
    assert calls[1].ended.wait(TIMEOUT_S)
    executor.close()


def test_failed_call_frees_its_thread(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    executor, over = CallExecutor(1), threading.Event()
    no_more_threads(monkeypatch)

    def fail() -> None:
        raise ValueError("a fault")

    executor.submit(RED, fail, joins=False)
    executor.submit(RED, over.set, joins=False)
    assert over.wait(TIMEOUT_S)
    assert "a control call failed" in caplog.text
    executor.close()


def test_a_closed_executor_starts_no_call() -> None:
    executor, later = CallExecutor(1), threading.Event()
    call = HeldCall(executor)
    executor.submit(RED, call, joins=False)
    executor.submit(RED, later.set, joins=False)
    assert call.began.wait(TIMEOUT_S)
    executor.close()
    executor.submit(RED, later.set, joins=False)
    call.cancel()
    executor._threads.shutdown(wait=True)
    assert not later.is_set()


class Port:
    """A port with connections whose both ends are here."""

    def __init__(self, host: str, opened: contextlib.ExitStack) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = opened.enter_context(socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::"))
        self._opened = opened
        self.number: int = self._listener.getsockname()[1]

    def connect(self, host: str = "127.0.0.1") -> socket.socket:
        """The peer's end."""
        near = self._opened.enter_context(socket.create_connection((host, self.number), TIMEOUT_S))
        self._opened.enter_context(self._listener.accept()[0])
        return near


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def grpc_name(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.0)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True


@pytest.mark.promise("authentication")
@pytest.mark.parametrize(("listens", "reaches"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "::1")])
def test_the_oldest_connections_over_the_limit_are_closed(listens: str, reaches: str, opened: contextlib.ExitStack) -> None:
    port = Port(listens, opened)
    limit = UnauthenticatedConnections(port.number, most=2, max_connections=8)
    known = port.connect(reaches)
    limit.authenticated(grpc_name(known))
    first = port.connect(reaches)
    assert limit.enforce() == 0
    second = port.connect(reaches)
    assert limit.enforce() == 0
    others = [port.connect(reaches) for _ in range(2)]
    assert limit.enforce() == 2
    assert [is_open(sock) for sock in (known, first, second, *others)] == [True, False, False, True, True]
    first.close()
    second.close()
    limit.authenticated(grpc_name(others[0]))
    port.connect(reaches)
    assert limit.enforce() == 0
    assert all(is_open(sock) for sock in (known, *others))


def test_other_descriptors_are_left_alone(opened: contextlib.ExitStack) -> None:
    port, other = Port("127.0.0.1", opened), Port("127.0.0.1", opened)
    pair = socket.socketpair()
    for sock in pair:
        opened.enter_context(sock)
    theirs = [other.connect() for _ in range(4)]
    limit = UnauthenticatedConnections(port.number, most=1, max_connections=8)
    limit.authenticated("unix:/run/kvstore/master.sock")
    before = len(os.listdir("/proc/self/fd"))
    assert limit.enforce() == 0
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(is_open(sock) for sock in (*pair, *theirs))


def test_known_peers_are_bounded(opened: contextlib.ExitStack) -> None:
    port = Port("127.0.0.1", opened)
    limit = UnauthenticatedConnections(port.number, most=1, max_connections=1)
    peers = [port.connect() for _ in range(3)]
    for peer in (peers[0], peers[1], peers[0], peers[2]):
        limit.authenticated(grpc_name(peer))
    port.connect()
    assert limit.enforce() == 1
    assert [is_open(peer) for peer in peers] == [True, False, True]
