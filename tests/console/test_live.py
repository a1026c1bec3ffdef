"""The console of a real master over a real cluster: what it shows is so, and what an operator does happens."""

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.testing.transfer.awaited import eventually
from tests.client.embedded import embedded

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Live:
    cluster: LocalCluster
    address: str

    def ask(self, path: str, told: Any = None) -> Any:
        data = json.dumps(told).encode() if told is not None else None
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())

    def node(self, name: str) -> dict[str, Any] | None:
        cluster = self.ask("/api/state")["cluster"]
        rows = [dict(zip(cluster["nodes"]["fields"], row, strict=True)) for row in cluster["nodes"]["rows"]] if cluster else []
        return next((row for row in rows if row["name"] == name), None)

    def has(self, name: str, **facts: Any) -> bool:
        found = self.node(name)
        return found is not None and all(found[key] == value for key, value in facts.items())


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with embedded(ClusterPlan(dram="4MiB", nodes=2, is_private=True)) as cluster:
        with cluster.control() as control:
            http = control.status().http
        yield Live(cluster, f"http://{http}")


def test_what_is_held_and_where_is_shown(live: Live) -> None:
    with Client(live.cluster.address) as client:
        client.put_batch([b"a", b"b"], [b"x" * 100, b"y" * 50], namespace="shown", parents=[None, b"a"], ack="cluster")
    eventually(lambda: live.has("node-0", state="alive"), "the node is shown alive")
    eventually(lambda: live.ask("/api/state")["cluster"]["totals"]["blocks"] >= 2, "the blocks are counted")
    eventually(lambda: ("nodes", "put") in _asked_for(live), "what the node was asked for is told")
    assert ("master", "publish") in _asked_for(live)
    found = live.ask("/api/prefixes?namespace=shown&segments=10")
    assert ("shown", 2, 150, 150) in [(one["namespace"], one["blocks"], one["bytes"], one["dram_bytes"]) for one in found["namespaces"]]
    assert [(bytes.fromhex(one["key"]), one["blocks"], one["subtree_bytes"]) for one in found["segments"]] == [(b"a", 2, 150)]
    assert [host["topology"]["host"] != "" for host in live.ask("/api/hosts?node=node-0")] == [True]


@pytest.mark.promise("observable")
def test_what_the_nics_of_a_nodes_host_carry_is_told(live: Live) -> None:
    def devices() -> set[str]:
        return set(live.ask("/api/flows?node=node-0")[0]["links"])

    topology = live.ask("/api/hosts?node=node-0")[0]["topology"]
    eventually(lambda: devices() == {nic["name"] for nic in topology["nics"]}, "every NIC of this host has counters of the kernel")


@pytest.mark.promise("observable")
def test_prefixes_that_are_read_are_the_hottest(live: Live) -> None:
    keys = [b"h1", b"h2", b"cold"]
    with Client(live.cluster.address) as client:
        client.put_batch(keys, [b"x" * 100] * 3, namespace="hot", parents=[None, b"h1", None], ack="cluster")

        def hottest() -> list[tuple[bytes, int, bool]]:
            assert client.get_batch(keys[:2]) == [b"x" * 100] * 2
            found = live.ask("/api/prefixes?namespace=hot&segments=10&by=reads")["segments"]
            return [(bytes.fromhex(one["key"]), one["blocks"], one["reads_per_s"] > 0) for one in found]

        eventually(lambda: hottest() == [(b"h1", 2, True)], "what is read is told, and what is not is not")
        assert len(live.ask("/api/prefixes?namespace=hot&segments=10")["segments"]) == 2


def _asked_for(live: Live) -> list[tuple[str, str]]:
    return [(one["where"], one["operation"]) for one in live.ask("/api/state")["cluster"]["operations"]]


@pytest.mark.promise("least-privilege")
def test_a_namespace_is_pinned_let_go_and_removed(live: Live) -> None:
    with Client(live.cluster.address) as client:
        client.put_batch([b"p", b"q"], [b"1", b"2"], namespace="kept", ack="cluster")
        client.put(b"other", b"3", namespace="elsewhere", ack="cluster")
        assert "Pinned 2 blocks" in live.ask("/api/actions/pin", {"namespace": "kept", "pinned": True})["text"]
        assert "Removed 0 blocks" in live.ask("/api/actions/remove", {"namespace": "kept"})["text"]
        assert "Unpinned 2 blocks" in live.ask("/api/actions/pin", {"namespace": "kept", "pinned": False})["text"]
        assert "Removed 2 blocks" in live.ask("/api/actions/remove", {"namespace": "kept"})["text"]
        assert [client.get(key) for key in (b"p", b"q", b"other")] == [None, None, b"3"]


@pytest.mark.promise("least-privilege")
def test_node_is_drained_undrained_dies_and_is_forgotten(live: Live) -> None:
    live.ask("/api/actions/drain", {"node": "node-1"})
    eventually(lambda: live.has("node-1", drain="drained"), "it is drained")
    live.ask("/api/actions/drain", {"node": "node-1", "cancel": True})
    eventually(lambda: live.has("node-1", drain=""), "it accepts blocks again")
    live.cluster.kill_node(1)
    eventually(lambda: live.has("node-1", state="dead"), "it is dead")
    live.ask("/api/actions/forget", {"node": "node-1"})
    eventually(lambda: live.node("node-1") is None, "it is forgotten")
