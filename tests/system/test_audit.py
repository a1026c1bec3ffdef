"""Changes and refused logins leave an audit record: at each of three masters, by the command line, the console and the API."""

import json
import urllib.parse
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.main import kvstore
from kvstore.protocol.errors import KVStoreError, Unauthorized
from tests.credentials import OPERATOR, tokens_file
from tests.system.running import DEADLINE_S, System, until
from tests.system.test_standby import LEASE
from tests.telemetry.http.asking import Answer, ask

MASTERS: Final = 3


def run(system: System, *arguments: str, token: str = OPERATOR) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(kvstore, [command, *rest, "--master", system.address, "--token", token, "--deadline-s", "60"])


def trail(system: System, *arguments: str) -> list[dict[str, Any]]:
    """Return the entries that `kvstore audit` prints; none while no master responds."""
    found = run(system, "audit", "--json", "-n", "1000", *arguments)
    return [json.loads(line) for line in found.stdout.splitlines()] if found.exit_code == 0 else []


def short(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(entry[name] for name in ("kind", "actor", "peer", "via", "action", "target", "old", "new", "result"))


@pytest.fixture
def system(tmp_path: Path, etcd_url: str) -> Iterator[System]:
    tokens = tokens_file(tmp_path)
    with System(tmp_path, f"{etcd_url}/{uuid.uuid4()}", masters=MASTERS) as made:
        made.settings = replace(made.settings, token=OPERATOR)
        made.start_masters(*LEASE, "--tokens", tokens)
        yield made


def console(system: System, index: int, path: str, told: Any, token: str = OPERATOR) -> Answer:
    place = urllib.parse.urlsplit(system.masters[index].facts("ready", deadline_s=0)["console"]).netloc
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return ask(place, path, method="POST", headers=headers, body=json.dumps(told).encode())


@pytest.mark.promise("audit-trail")
def test_audit_shows_operators_actions_at_three_masters(system: System) -> None:
    """By the command line, and by the console of each master, of which one owns the catalog."""
    assert run(system, "quota", "set", "red", "--dram-bytes", "96GiB").exit_code == 0
    for index in range(MASTERS):
        answer = console(system, index, "/api/actions/quota", {"tenant": "red", "limit": "pins", "value": str(index + 1)})
        assert answer.status == 200, answer.text
    target, who = "tenant red", ("operator", "operator", "127.0.0.1")
    expected = [
        (*who, "control", "quota_set", target, "dram_bytes no limit", "dram_bytes 96 GiB", "done"),
        (*who, "console", "quota_set", target, "pins no limit", "pins 1", "done"),
        (*who, "console", "quota_set", target, "pins 1", "pins 2", "done"),
        (*who, "console", "quota_set", target, "pins 2", "pins 3", "done"),
    ]
    until(lambda: [short(one) for one in trail(system, "--action", "quota_set")] == expected, "all changes are shown")
    assert all(one["credential"] and one["credential"] != OPERATOR for one in trail(system))


@pytest.mark.promise("audit-trail")
def test_node_that_was_forgotten_says_what_it_has_lost(system: System, tmp_path: Path) -> None:
    """It was stopped in an orderly way: it is stopped, not dead, also for the next owner of the catalog."""
    system.start_node("n0", "--dram", "16MiB", "--nvme", f"{tmp_path / 'nvme'}:64MiB", "--drain-s", "60")
    with system.client(tenant="red", token="secret") as client:
        assert client.put(b"key", bytes(1000))
    assert system.nodes["n0"].stop(deadline_s=DEADLINE_S)
    until(lambda: states(system) == ["stopped"], "the node is stopped")
    system.masters[owner_of(system)].kill()
    until(lambda: states(system) == ["stopped"], "the next owner has it stopped too")
    assert run(system, "forget", "n0").exit_code == 0
    system.start_node("n0")
    (entry,) = trail(system, "--action", "return")
    assert (entry["kind"], entry["actor"], entry["target"]) == ("node", "n0", "node n0")
    assert entry["detail"] == "1 blocks that it held are dropped: the node had been forgotten"
    assert states(system) == ["alive"]


def states(system: System) -> list[str]:
    """Of the nodes; nothing while no master owns the catalog."""
    try:
        return [node.state for node in system.status().nodes]
    except KVStoreError:
        return []


def owner_of(system: System) -> int:
    port = int(system.status().owner.address.rpartition(":")[2])
    return next(index for index, (listen, _control) in enumerate(system._master_ports) if listen == port)


@pytest.mark.promise("audit-trail")
def test_audit_shows_refused_logins_of_all_masters(system: System) -> None:
    for index in range(MASTERS):
        assert console(system, index, "/api/actions/quota", {}, token="guess").status == 401
    with pytest.raises(Unauthorized):
        system.client(tenant="red", token="guess").get(b"key")
    assert run(system, "forget", "n0", token="guess").exit_code == 2

    def refused() -> list[tuple[str, str]]:
        entries = trail(system, "--refused", "--action", "login", "--by", "127.0.0.1")
        return sorted({(entry["via"], entry["master"]) for entry in entries})

    until(lambda: [via for via, _master in refused()].count("http") == MASTERS, "each console's refusal is shown")
    until(lambda: "client" in [via for via, _master in refused()], "so is that of a client")


@pytest.mark.promise("audit-trail")
def test_the_trail_survives_masters_and_their_owner(system: System, tmp_path: Path) -> None:
    assert run(system, "quota", "set", "red", "--pins", "7").exit_code == 0
    (before,) = trail(system, "--action", "quota_set")
    system.masters[owner_of(system)].kill()
    until(lambda: trail(system, "--action", "quota_set") == [before], "the next owner shows the same entry")
