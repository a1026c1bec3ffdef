"""Promises of sessions.py, slow.py and of `kvstore token ls`, against a real cluster."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvstore.client.cli.main import kvstore
from tests.credentials import ENGINE, JOIN, OPERATOR, tokens_file
from tests.system.running import System, until


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    tokens = tokens_file(tmp_path, more='[[tenants.late]]\ntoken = "short"\nrole = "read"\nexpires = 2100-01-01\n')
    with System(tmp_path) as made:
        made.start_master(0, "--tokens", tokens)
        yield made


def run(system: System, *arguments: str, token: str = OPERATOR) -> Result:
    return CliRunner().invoke(kvstore, [*arguments, "--master", system.address, "--token", token])


def rows(system: System, *arguments: str) -> list[dict[str, Any]]:
    found = run(system, *arguments, "--json")
    assert found.exit_code == 0, found.output
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_sessions_are_listed_and_ended(system: System) -> None:
    system.start_node("n0", "--dram", "16MiB")
    with system.client(tenant="red", token="secret") as client:
        assert client.exists(b"key") is False
        found = {(one["kind"], one["name"]): one for one in rows(system, "sessions")}
        red, node = found["tenant", "red"], found["node", "n0"]
        assert (red["role"], node["role"]) == ("write", "")
        assert red["requests"] >= 1
        assert red["credential"]
        assert "tenant red" in run(system, "sessions").stdout
        assert run(system, "sessions", "--end", str(red["id"])).stdout == f"session {red['id']} is closed\n"
        until(lambda: red["id"] not in [one["id"] for one in rows(system, "sessions")], "it is closed")
        assert client.exists(b"key") is False, "the client connects again"
    assert run(system, "sessions", "--end", str(red["id"])).exit_code == 2
    assert "is no session" in run(system, "sessions", "--end", "red").stderr
    assert "name the master of session 1" in run(system, "sessions", "--end", "1@nowhere").stderr
    ended = [(one["result"], one["old"].split(" at ")[0]) for one in rows(system, "audit", "--action", "session_end")]
    assert ended == [("done", "tenant red"), ("failed", "")]


def test_tokens_are_listed_without_what_opens_anything(system: System) -> None:
    found = {(one["kind"], one["name"]): one for one in rows(system, "token", "ls")}
    assert found.keys() == {("tenant", "red"), ("tenant", "late"), ("node", ""), ("instance", ""), ("operator", "operator")}
    assert found["tenant", "late"]["expires_s"] == 4_102_444_800
    assert found["tenant", "red"]["expires_s"] is None
    shown = run(system, "token", "ls").stdout
    assert "2100-01-01" in shown
    for secret in ("secret", "short", JOIN, ENGINE, OPERATOR):
        assert secret not in shown + json.dumps(list(found.values()))


def test_slow_requests_of_nodes_and_masters_are_listed_by_tenant(system: System) -> None:
    """A put of 16 MiB by TCP takes more than a millisecond on any machine."""
    system.start_node("n0", "--dram", "64MiB")
    with system.remote_client(tenant="red", token="secret") as client:
        assert client.put(b"key", bytes(16 << 20))

    def at_node() -> list[dict[str, Any]]:
        return [one for one in rows(system, "slow") if one["at"] == "n0" and one["tenant"] == "red"]

    until(lambda: bool(at_node()), "the node's heartbeat has it")
    one = at_node()[0]
    assert one["duration_us"] >= 1000
    assert one["peer"].startswith("127.0.0.1:")
    assert one["operation"].replace("_", " ") in run(system, "slow", "--of-tenant", "red").stdout
    assert rows(system, "slow", "--of-tenant", "blue") == []
    assert len(rows(system, "slow", "-n", "1")) == 1
