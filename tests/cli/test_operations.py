"""Tests of operations.py and of token.py's table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console, RenderableType

from kvstore.cli.main import kvstore
from kvstore.cli.operations import matching, session_ids, sessions_table
from kvstore.cli.token import tokens_table
from kvstore.protocol import control_pb2 as pb
from tests.credentials import ENGINE, JOIN, OPERATOR, tokens_file
from tests.master.running import Places, master_in_thread
from tests.system.running import System, until

ALICE = pb.AuditEntry(number=1, time_s=1_700_000_000, kind="operator", actor="alice", peer="10.0.0.7", via="control", result="done")

DAY_S = 86_400.0


def run(places: Places, *arguments: str, token: str = OPERATOR) -> Result:
    return CliRunner().invoke(kvstore, [*arguments, "--master", places.listen, "--token", token])


def test_entries_are_printed_and_filtered(tmp_path: Path) -> None:
    with master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path)) as places:
        assert run(places, "quota", "set", "red", "--pins", "7").exit_code == 0
        assert run(places, "forget", "n9").exit_code == 2
        shown = [json.loads(line) for line in run(places, "audit", "--json").stdout.splitlines()]
        assert [(entry["action"], entry["result"]) for entry in shown] == [("quota_set", "done"), ("forget", "failed")]
        assert shown[1]["detail"] == "there is no node 'n9'; there are: none"
        table = run(places, "audit", "--action", "quota_set", "--since", "1h", "--by", "operator").stdout
        assert "pins no limit" in table
        assert "forget" not in table
        assert "no such entry" in run(places, "audit", "--since", "2100-01-01").stdout
        assert len(run(places, "audit", "--json", "-n", "1").stdout.splitlines()) == 1


def test_audit_trail_is_for_operators(tmp_path: Path) -> None:
    """The refusal is an entry itself."""
    with master_in_thread(tmp_path / "run", tokens=tokens_file(tmp_path)) as places:
        refused = CliRunner().invoke(kvstore, ["audit", "--master", places.listen, "--tenant", "red", "--token", "secret"])
        assert refused.exit_code == 2
        (entry,) = [json.loads(line) for line in run(places, "audit", "--json", "--refused").stdout.splitlines()]
    assert (entry["kind"], entry["actor"], entry["action"], entry["count"]) == ("tenant", "red", "audit", 1)


@pytest.mark.parametrize("since", ["yesterday", "5 m", "-1h"])
def test_bad_time_says_how_to_write_one(since: str) -> None:
    refused = CliRunner().invoke(kvstore, ["audit", "--since", since])
    assert refused.exit_code == 2
    assert "is not a time: write 90s, 15m, 2h, 7d" in refused.stderr


ALICE.MergeFrom(pb.AuditEntry(action="quota_set", target="tenant red", old="pins 1", new="pins 2"))
GUESS = pb.AuditEntry(number=2, time_s=1_700_000_100, kind="unauthenticated", peer="10.0.0.9", via="http", action="login", result="refused")
GUESS.MergeFrom(pb.AuditEntry(detail="wrong token", count=17))


def found(since_s: float | None = None, by: str | None = None, action: str | None = None, result: str | None = None) -> list[pb.AuditEntry]:
    return matching([ALICE, GUESS], since_s=since_s, by=by, action=action, result=result)


def test_filters_select_entries() -> None:
    assert found() == [ALICE, GUESS]
    assert found(since_s=1_700_000_050.0) == found(by="10.0.0.9") == found(result="refused") == [GUESS]
    assert found(by="alice") == found(by="operator") == found(action="quota_set") == [ALICE]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    tokens = tokens_file(tmp_path, more='[[tenants.late]]\ntoken = "short"\nrole = "read"\nexpires = 2100-01-01\n')
    with System(tmp_path) as made:
        made.start_master(0, "--tokens", tokens)
        yield made


def run_sessions(system: System, *arguments: str, token: str = OPERATOR) -> Result:
    return CliRunner().invoke(kvstore, [*arguments, "--master", system.address, "--token", token])


def rows(system: System, *arguments: str) -> list[dict[str, Any]]:
    found = run_sessions(system, *arguments, "--json")
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
        assert "tenant red" in run_sessions(system, "sessions").stdout
        assert run_sessions(system, "sessions", "--end", str(red["id"])).stdout == f"session {red['id']} is closed\n"
        until(lambda: red["id"] not in [one["id"] for one in rows(system, "sessions")], "it is closed")
        assert client.exists(b"key") is False, "the client connects again"
    assert run_sessions(system, "sessions", "--end", str(red["id"])).exit_code == 2
    assert "is not a session ID" in run_sessions(system, "sessions", "--end", "red").stderr
    assert "session 1 needs its master: name one of 1@" in run_sessions(system, "sessions", "--end", "1@nowhere").stderr
    ended = [(one["result"], one["old"].split(" at ")[0]) for one in rows(system, "audit", "--action", "session_end")]
    assert ended == [("done", "tenant red"), ("failed", "")]


def test_tokens_are_listed_without_what_opens_anything(system: System) -> None:
    found = {(one["kind"], one["name"]): one for one in rows(system, "token", "ls")}
    assert found.keys() == {("tenant", "red"), ("tenant", "late"), ("node", ""), ("instance", ""), ("operator", "operator")}
    assert found["tenant", "late"]["expires_s"] == 4_102_444_800
    assert found["tenant", "red"]["expires_s"] is None
    shown = run_sessions(system, "token", "ls").stdout
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
    assert one["operation"].replace("_", " ") in run_sessions(system, "slow", "--of-tenant", "red").stdout
    assert rows(system, "slow", "--of-tenant", "blue") == []
    assert len(rows(system, "slow", "-n", "1")) == 1


def text(table: RenderableType) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as printed:
        console.print(table)
    return printed.get()


def test_session_ids_have_the_master_when_several() -> None:
    red = pb.SessionStatus(id=7, kind="tenant", name="red", role="write", peer="10.0.0.7:5", age_s=3700, requests=1234, master="m1")
    node = pb.SessionStatus(id=7, kind="node", name="n1", peer="unix:uid 0 pid 9", master="m2")
    assert session_ids([red]) == ["7"]
    assert session_ids([red, node]) == ["7@m1", "7@m2"]
    shown = text(sessions_table([red, node]))
    assert all(word in shown for word in ("tenant red", "write", "10.0.0.7:5", "1,234", "node n1", "unix:uid 0 pid 9"))
    assert "No connections." in text(sessions_table([]))


def test_tokens_show_when_they_end() -> None:
    tokens = [
        pb.TokenStatus(kind="node", credential="aa"),
        pb.TokenStatus(kind="tenant", name="red", role="read", credential="bb", expires_s=20 * DAY_S),
        pb.TokenStatus(kind="tenant", name="blue", role="read", credential="cc", expires_s=DAY_S),
    ]
    lines = text(tokens_table(tokens, now_s=2 * DAY_S)).splitlines()
    assert lines[1].split() == ["node", "*", "-", "aa", "never"]
    assert "1970-01-21 00:00, in 18" in lines[2]
    assert "1970-01-02 00:00: expired" in lines[3]
    assert "No tokens" in text(tokens_table([], now_s=0))
