"""Promises of documents.py."""

import threading

import pytest

from kvstore.console.documents import FAILURE_S, MAX_CACHED, CachedCalls, host
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Unavailable
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background, is_quiet
from tests.console.serving import Clock
from tests.console.simulated import Simulated


def test_a_host_has_its_topology_or_says_why_not() -> None:
    told = host(Simulated(1, lambda: 0.0).topologies()[0])
    assert [nic["name"] for nic in told["topology"]["nics"]] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "eno1"]
    assert host(pb.NodeTopology(name="n", state="dead"))["note"] == "it has not reported its topology"
    assert host(pb.NodeTopology(name="n", topology=b"{"))["note"].startswith("its topology cannot be read: ")


def test_an_answer_is_asked_for_again_when_it_is_old() -> None:
    clock, asked = Clock(), list[int]()

    def ask() -> int:
        asked.append(1)
        return len(asked)

    cached = CachedCalls(5, clock=clock)
    assert [cached.get("a", ask), cached.get("a", ask), cached.get("b", ask)] == [1, 1, 2]
    clock.now_s += 5
    assert cached.get("a", ask) == 3


def test_an_error_is_kept_for_a_moment_and_old_keys_go() -> None:
    clock = Clock()
    cached = CachedCalls(5, clock=clock)

    def fail() -> int:
        raise Unavailable("not now")

    for ask in (fail, lambda: 1):
        with pytest.raises(Unavailable):
            cached.get("a", ask)
    clock.now_s += FAILURE_S
    assert cached.get("a", lambda: 1) == 1
    for key in range(MAX_CACHED):
        cached.get(key, lambda: 0)
    assert cached.get("a", lambda: 2) == 2


def test_cached_calls_share_one_call_per_key() -> None:
    asked, entered, end = list[int](), threading.Event(), threading.Event()
    cached = CachedCalls(5)

    def fail_slowly() -> int:
        asked.append(1)
        entered.set()
        assert end.wait(PATIENCE_S)
        raise Unavailable("not now")

    waiting = [in_background(lambda: cached.get("a", fail_slowly))]
    assert entered.wait(PATIENCE_S)
    waiting.append(in_background(lambda: cached.get("a", fail_slowly)))
    assert is_quiet(waiting[1])
    other = in_background(lambda: cached.get("b", lambda: 2))
    assert other.result(PATIENCE_S) == 2
    end.set()
    for one in waiting:
        assert isinstance(one.exception(PATIENCE_S), Unavailable)
    assert asked == [1]
