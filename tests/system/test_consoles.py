"""Every master serves the console of the whole cluster, regardless of the partitions that it owns and the state of the others."""

import json
import os
import signal
import urllib.parse
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.credentials import OPERATOR, tokens_file
from tests.security.tls.certified import flags, given_to, shared
from tests.system.running import System, until
from tests.system.test_standby import LEASE
from tests.telemetry.http.asking import Answer, ask

BLOCKS: Final = 60
LOOK_S: Final = 0.2
"""Poll interval when each poll asks consoles for whole clusters, which they look at once a second."""
PATHS: Final = ("/api/history?samples=10", "/api/hosts?node=n0", "/api/flows?node=n0", "/api/tenants", "/api/slow", "/api/prefixes")
"""What the views ask beside the state and the masters. The page itself is the same at each master (tests/console/test_page.py)."""
TOKEN: Final = {"Authorization": f"Bearer {OPERATOR}"}


class Consoles:
    """Masters of one cluster by their numbers, and what their consoles tell."""

    def __init__(self, system: System, *master_flags: str, count: int) -> None:
        self.system = system
        self.places: dict[int, str] = {}
        self._flags = master_flags
        for index in range(count):
            self.start(index)

    def start(self, index: int) -> None:
        told = self.system.start_master(index, *self._flags).facts("ready", deadline_s=0)["console"]
        self.places[index] = urllib.parse.urlsplit(told).netloc

    def ask(self, index: int, path: str, told: Any = None, headers: dict[str, str] | None = None) -> Answer:
        shown = TOKEN if headers is None else headers
        if told is None:
            return ask(self.places[index], path, headers=shown)
        return ask(
            self.places[index],
            path,
            method="POST",
            headers={**shown, "Content-Type": "application/json"},
            body=json.dumps(told).encode(),
        )

    def cluster(self, index: int) -> Any:
        return self.ask(index, "/api/state").json()["cluster"]

    def node(self, index: int, name: str) -> dict[str, Any]:
        nodes = (self.cluster(index) or {"nodes": {"fields": [], "rows": []}})["nodes"]
        rows = [dict(zip(nodes["fields"], row, strict=True)) for row in nodes["rows"]]
        return next((row for row in rows if row["name"] == name), {})

    def act(self, index: int, name: str, **told: Any) -> str:
        answer = self.ask(index, f"/api/actions/{name}", told)
        assert answer.status == 200, answer.text
        return str(answer.json()["text"])

    def shows(self, index: int, blocks: int = BLOCKS) -> bool:
        """All blocks and both nodes, and nothing missing."""
        cluster = self.cluster(index)
        alive = [self.node(index, name).get("state") for name in ("n0", "n1")]
        return cluster is not None and cluster["totals"]["blocks"] == blocks and alive == ["alive"] * 2 and not cluster["problems"]

    def roles(self, index: int) -> list[tuple[str, str]]:
        """Of the masters that this one knows, and what is wrong with each."""
        return sorted((one["role"], one["error"]) for one in self.ask(index, "/api/masters").json())

    def owned(self, index: int, partitions: int) -> int:
        return len(self.system.owned(index, partitions))


def put_all(system: System) -> None:
    system.start_nodes("--dram", "32MiB")
    with system.client(tenant="red", token="secret") as client:
        keys = [b"block-%d" % number for number in range(BLOCKS)]
        client.put_batch(keys, [b"x" * 100] * BLOCKS, namespace="shown", parents=[None, *keys[:-1]])


@pytest.fixture
def three(tmp_path: Path, etcd_url: str) -> Iterator[Consoles]:
    """Three masters with tokens that have shared four partitions out, and two nodes."""
    with System(tmp_path, f"{etcd_url}/{uuid.uuid4()}", masters=3) as system:
        system.settings = replace(system.settings, token=OPERATOR)
        found = Consoles(system, "--partitions", "4", "--tokens", tokens_file(tmp_path), *LEASE, count=3)
        until(lambda: system.is_shared_out(4), "shares that stay", every_s=LOOK_S)
        put_all(system)
        yield found


def test_console_of_each_master_shows_and_acts_on_the_whole(three: Consoles) -> None:
    for index in range(3):
        until(lambda index=index: three.shows(index), f"the whole cluster at master {index}", every_s=LOOK_S)  # type: ignore[misc]
        cluster = three.cluster(index)
        assert (cluster["catalog"]["partitions"], sorted(cluster["catalog"]["shares"].values())) == (4, [1, 1, 2])
        assert three.roles(index) == [("owner", "")] * 3
        assert {one["node"] for one in three.ask(index, "/api/hosts?node=n0&node=n1").json()} == {"n0", "n1"}
        found = three.ask(index, "/api/prefixes?tenant=red&namespace=shown&segments=10").json()
        assert [(one["tenant"], one["namespace"], one["blocks"]) for one in found["namespaces"]] == [("red", "shown", BLOCKS)]
        assert [one["blocks"] for one in found["segments"]] == [BLOCKS], "one prompt, across all partitions"
        of = {"tenant": "red", "namespace": "shown"}
        assert f"Pinned {BLOCKS} blocks" in three.act(index, "pin", **of, pinned=True)
        assert "Removed 0 blocks" in three.act(index, "remove", **of)
        assert f"Unpinned {BLOCKS} blocks" in three.act(index, "pin", **of, pinned=False)
        three.act(index, "drain", node="n1")
        until(lambda index=index: three.node(index, "n1").get("drain") == "drained", "it is drained of all partitions", every_s=LOOK_S)  # type: ignore[misc]
        three.act(index, "drain", node="n1", cancel=True)
        until(lambda index=index: three.node(index, "n1").get("drain") == "", "it accepts blocks again", every_s=LOOK_S)  # type: ignore[misc]
        three.act(index, "quota", tenant="red", limit="pins", value=f"{100 + index}")
        three.act(index, "quota", tenant="red", limit="pins", value="")
        refused = three.ask(index, "/api/actions/drain", {"node": "nowhere"})
        assert (refused.status, "there is no node 'nowhere'" in refused.text) == (400, True)
    assert f"Removed {BLOCKS} blocks" in three.act(2, "remove", tenant="red", namespace="shown")
    until(lambda: three.shows(0, 0), "the others show that they are gone", every_s=LOOK_S)


def test_console_refused_by_one_master_gets_nothing(three: Consoles) -> None:
    until(lambda: three.shows(0), "the whole cluster", every_s=LOOK_S)
    for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "Bearer guess"}):
        assert three.ask(0, "/api/state", headers=headers).status == 401
        assert three.ask(0, "/api/actions/drain", {"node": "n0"}, headers=headers).status == 401
    assert three.node(0, "n0")["drain"] == ""


@pytest.mark.slow
def test_console_marks_silent_master_and_shows_the_rest(three: Consoles) -> None:
    until(lambda: all(three.shows(index) for index in range(3)), "the whole cluster at each master", every_s=LOOK_S)
    hanging = next(index for index in range(3) if three.owned(index, 4) == 2)
    left = next(index for index in range(3) if index != hanging)
    victim = three.system.masters[hanging]
    os.kill(victim.pid, signal.SIGSTOP)
    missing = f"127.0.0.1:{three.system._master_ports[hanging][0]}, which owns 2 of the 4 partitions, does not answer"

    def is_told() -> bool:
        return any(missing in trouble["text"] for trouble in three.cluster(left)["problems"])

    until(is_told, "the page says whom it does not hear", every_s=LOOK_S)
    assert three.cluster(left)["totals"]["blocks"] == BLOCKS, "what it was told last stays"
    os.kill(victim.pid, signal.SIGCONT)
    victim.kill()
    others = [index for index in range(3) if index != hanging]
    until(lambda: sum(three.owned(index, 4) for index in others) == 4, "the others own all", every_s=LOOK_S)
    for index in others:
        until(lambda index=index: three.shows(index), f"the whole cluster at master {index} again", every_s=LOOK_S)  # type: ignore[misc]
        until(lambda index=index: three.roles(index) == [("owner", "")] * 2, "of the one that is gone nothing is told", every_s=LOOK_S)  # type: ignore[misc]
    three.start(hanging)
    until(lambda: three.shows(hanging), "and at the one that was started again, by a key that it has made anew", every_s=LOOK_S)

    def is_asked_again() -> bool:
        found = three.roles(others[0])
        return ("owner", "") in found and len(found) == 3

    until(is_asked_again, "which the others ask again", every_s=LOOK_S)


def test_console_of_follower_shows_the_whole_by_tls(tmp_path: Path, etcd_url: str) -> None:
    """One partition, and certificates in place of tokens: the master that follows is a master by its own."""
    tls = flags(shared().master())
    with System(tmp_path, f"{etcd_url}/{uuid.uuid4()}", masters=2) as system:
        system.settings = given_to(system.settings, shared().client())
        found = Consoles(system, *tls, *LEASE, count=2)
        for name in ("n0", "n1"):
            system.start_node(name, "--dram", "32MiB", *flags(shared().node(name)))
        system.await_alive("n0", "n1")
        assert [found.owned(index, 1) for index in range(2)] == [1, 0]
        until(lambda: found.shows(1, 0), "the whole cluster at the follower", every_s=LOOK_S)
        assert sorted(role for role, _ in found.roles(1)) == ["following", "owner"]
        for path in PATHS:
            assert found.ask(1, path).status == 200, path
        found.act(1, "drain", node="n1")
        until(lambda: found.node(0, "n1").get("drain") == "drained", "what the follower was told is done by the owner", every_s=LOOK_S)
