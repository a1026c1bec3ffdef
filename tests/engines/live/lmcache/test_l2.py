"""LMCache's real L2 adapter interface and memory objects over a real cluster, in LMCache's own environment.

In every state of the cluster, no call raises, every task ends and signals its descriptor, and a failure is a miss.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.tools.cluster import LocalCluster
from kvstore.client import Client
from tests.client.embedded import embedded
from tests.engines.live.child import EngineChild
from tests.engines.live.conftest import PLAN
from tests.engines.live.full import filled

PROGRAM = Path(__file__).with_name("l2_child.py")
KIB = 1024


def adapter_json(master: str, **parameters: Any) -> str:
    """Return the value of `lmcache server --l2-adapter`."""
    names = {"type": "plugin", "module_path": "kvstore.engines.lmcache.l2", "class_name": "KVStoreL2Adapter"}
    return json.dumps(names | {"adapter_params": {"master": master, "dtype": "float32"} | parameters})


def child(cluster: LocalCluster, log: Path, **parameters: Any) -> EngineChild:
    return EngineChild("lmcache", PROGRAM, adapter_json(cluster.address, **parameters), log=log)


@pytest.fixture(scope="module")
def first(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineChild]:
    with child(cluster, tmp_path_factory.mktemp("first") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def second(cluster: LocalCluster, first: EngineChild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineChild]:
    """Another process with an adapter of its own."""
    with child(cluster, tmp_path_factory.mktemp("second") / "log") as running:
        yield running


def test_another_server_finds_and_loads_what_one_has_stored(first: EngineChild, second: EngineChild) -> None:
    names, sizes = ["a", "b", "c"], [256 * KIB, 1024 * KIB, 10]
    stored = first.ask("store", names=names, sizes=sizes, fills=[1, 2, 3])
    assert (stored["told"], stored["ok"], stored["bytes"]) == (True, True, sum(sizes))
    assert second.ask("lookup", names=[*names, "never"]) == {"told": True, "found": [True, True, True, False], "again": None}
    loaded = second.ask("load", names=[*names, "never"], sizes=[*sizes, 10])
    assert loaded == {"told": True, "loaded": [True, True, True, False], "contents": [1, 2, 3, 0]}


def test_users_of_different_salts_share_nothing(first: EngineChild, second: EngineChild) -> None:
    first.ask("store", names=["s"], sizes=[1000], fills=[4], salt="ann")
    assert second.ask("lookup", names=["s"], salt="bob")["found"] == [False]
    assert second.ask("lookup", names=["s"])["found"] == [False]
    assert second.ask("load", names=["s"], sizes=[1000], salt="ann")["contents"] == [4]


def test_usage_is_what_this_server_has_stored_and_not_deleted(first: EngineChild) -> None:
    before = first.ask("usage")
    first.ask("store", names=["u1", "u2"], sizes=[1000, 500], fills=[1, 1], salt="carl")
    first.ask("store", names=["u1"], sizes=[1000], fills=[1], salt="carl")
    usage = first.ask("usage")
    assert usage["bytes"] == before["bytes"] + 1500
    assert usage["salts"]["carl"] == 1500
    assert usage["evicts"] is False
    first.ask("delete", names=["u1", "never"], salt="carl")
    assert first.ask("usage")["salts"]["carl"] == 500
    assert first.ask("lookup", names=["u1", "u2"], salt="carl")["found"] == [False, True]


def test_the_status_says_that_the_store_can_be_reached(first: EngineChild) -> None:
    first.ask("lookup", names=["a"])
    status = first.ask("status")
    assert status["is_healthy"] is True
    assert status["tasks"]["lookup"]["jobs"] >= 1


def test_what_a_lookup_locked_stays_until_it_is_unlocked(first: EngineChild, second: EngineChild) -> None:
    first.ask("store", names=["l1", "l2"], sizes=[1000] * 2, fills=[1, 2])
    assert second.ask("lookup", names=["l1", "l2"], keeps=True)["found"] == [True, True]
    first.ask("delete", names=["l1", "l2"])
    assert second.ask("load", names=["l1", "l2"], sizes=[1000] * 2)["contents"] == [1, 2]
    second.ask("unlock", names=["l1", "l2"])
    first.ask("delete", names=["l1", "l2"])
    assert second.ask("lookup", names=["l1", "l2"])["found"] == [False, False]


def test_object_evicted_between_lookup_and_load_is_a_miss(first: EngineChild, second: EngineChild) -> None:
    names, sizes = ["v1", "v2", "v3"], [1000] * 3
    first.ask("store", names=names, sizes=sizes, fills=[1, 2, 3])
    assert second.ask("lookup", names=names)["found"] == [True] * 3
    first.ask("delete", names=["v2"])
    assert second.ask("load", names=names, sizes=sizes) == {"told": True, "loaded": [True, False, True], "contents": [1, 0, 3]}
    assert second.ask("store", names=["v2"], sizes=[1000], fills=[2])["ok"]
    assert first.ask("load", names=names, sizes=sizes)["contents"] == [1, 2, 3]


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[tuple[LocalCluster, EngineChild]]:
    """A cluster that a test may break, and a server that has stored `x` and `y` in it."""
    with ExitStack() as stack:
        cluster = stack.enter_context(embedded(PLAN))
        server = stack.enter_context(child(cluster, tmp_path / "log", load_deadline_s=3, lookup_deadline_s=3))
        assert server.ask("store", names=["x", "y"], sizes=[100 * KIB] * 2, fills=[7, 8])["ok"]
        yield cluster, server


def all_miss(server: EngineChild) -> None:
    while any(server.ask("lookup", names=["x", "y"])["found"]):
        pass  # what a node that has just died shows on its host counts for 0.1 s more
    assert server.ask("lookup", names=["x", "y"]) == {"told": True, "found": [False, False], "again": None}
    assert server.ask("load", names=["x", "y"], sizes=[100 * KIB] * 2)["loaded"] == [False, False]


def test_killed_node_makes_its_objects_misses(doomed: tuple[LocalCluster, EngineChild]) -> None:
    cluster, server = doomed
    cluster.kill_node(0)
    while any((loaded := server.ask("load", names=["x", "y"], sizes=[100 * KIB] * 2))["loaded"]):
        pass  # as in `all_miss`
    assert loaded["told"]
    stored = server.ask("store", names=["z"], sizes=[100 * KIB], fills=[9])
    assert (stored["told"], stored["ok"]) == (True, False)
    cluster.restart_node(0)
    cluster.wait_ready()
    while not server.ask("store", names=["z"], sizes=[100 * KIB], fills=[9])["ok"]:
        pass  # until a probe of the breaker has found the node again
    while server.ask("load", names=["z"], sizes=[100 * KIB])["contents"] != [9]:
        pass


def test_killed_master_and_node_are_misses_for_the_server(doomed: tuple[LocalCluster, EngineChild]) -> None:
    cluster, server = doomed
    cluster.kill_node(0)
    os.kill(cluster.master_pid, signal.SIGKILL)
    all_miss(server)
    assert not server.ask("store", names=["z"], sizes=[1000], fills=[1])["ok"]
    assert server.ask("delete", names=["x"]) == {}
    assert server.ask("status")["is_healthy"] is False
    assert server.ask("end") == {}


def test_a_killed_master_leaves_the_objects_of_this_host_s_nodes(doomed: tuple[LocalCluster, EngineChild]) -> None:
    """But to the one task that finds out that it is gone, of which all are misses."""
    cluster, server = doomed
    os.kill(cluster.master_pid, signal.SIGKILL)
    assert server.ask("lookup", names=["never"])["found"] == [False]
    for _ in range(3):
        assert server.ask("lookup", names=["x", "y", "never"])["found"] == [True, True, False]
        assert server.ask("load", names=["x", "y"], sizes=[100 * KIB] * 2) == {"told": True, "loaded": [True, True], "contents": [7, 8]}


def test_a_full_store_costs_only_what_it_does_not_take(doomed: tuple[LocalCluster, EngineChild]) -> None:
    cluster, server = doomed
    with Client(cluster.address) as client, filled(client):
        stored = server.ask("store", names=["z"], sizes=[100 * KIB], fills=[9])
        assert (stored["told"], stored["ok"]) == (True, False)
        assert server.ask("load", names=["z"], sizes=[100 * KIB])["loaded"] == [False]
    while not server.ask("store", names=["z"], sizes=[100 * KIB], fills=[9])["ok"]:
        pass  # until a probe of the breaker has found room again
    assert server.ask("load", names=["z"], sizes=[100 * KIB])["contents"] == [9]


def test_stopped_cluster_costs_one_task_its_deadline(doomed: tuple[LocalCluster, EngineChild]) -> None:
    """The stopped daemons accept connections and do not respond.

    The first task ends at its deadline; the circuit breaker answers the later ones.
    """
    cluster, server = doomed
    stopped = [cluster.master_pid, cluster.nodes[0].pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        found = server.ask("lookup", names=["never asked before"])
        assert (found["told"], found["found"]) == (True, [False])
        skipped = server.ask("status")["tasks"]["lookup"]["skipped"]
        assert server.ask("lookup", names=["another"])["found"] == [False]
        assert server.ask("status")["tasks"]["lookup"]["skipped"] == skipped + 1
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def test_invalid_settings_keep_the_server_from_starting(cluster: LocalCluster, tmp_path: Path) -> None:
    refused = child(cluster, tmp_path / "log", num_workers=4)
    with pytest.raises(AssertionError, match="unknown setting num_workers"):
        refused.__enter__()
