"""Promises of operator_tables.py."""

from rich.console import Console, RenderableType

from kvstore.client.tools.operator_tables import session_ids, sessions_table, slow_table, tokens_table
from kvstore.protocol import control_pb2 as pb

DAY_S = 86_400.0


def text(table: RenderableType) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as printed:
        console.print(table)
    return printed.get()


def test_sessions_are_named_by_their_master_where_there_are_several() -> None:
    red = pb.SessionStatus(id=7, kind="tenant", name="red", role="write", peer="10.0.0.7:5", age_s=3700, requests=1234, master="m1")
    node = pb.SessionStatus(id=7, kind="node", name="n1", peer="unix:uid 0 pid 9", master="m2")
    assert session_ids([red]) == ["7"]
    assert session_ids([red, node]) == ["7@m1", "7@m2"]
    shown = text(sessions_table([red, node]))
    assert all(word in shown for word in ("tenant red", "write", "10.0.0.7:5", "1,234", "node n1", "unix:uid 0 pid 9"))
    assert "Nobody is connected." in text(sessions_table([]))


def test_tokens_show_when_they_end() -> None:
    tokens = [
        pb.TokenStatus(kind="node", credential="aa"),
        pb.TokenStatus(kind="tenant", name="red", role="read", credential="bb", expires_s=20 * DAY_S),
        pb.TokenStatus(kind="tenant", name="blue", role="read", credential="cc", expires_s=DAY_S),
    ]
    lines = text(tokens_table(tokens, now_s=2 * DAY_S)).splitlines()
    assert lines[1].split() == ["node", "*", "-", "aa", "never"]
    assert "1970-01-21 00:00, in 18" in lines[2]
    assert "1970-01-02 00:00: has ended" in lines[3]
    assert "No tokens" in text(tokens_table([], now_s=0))


def test_slow_requests_show_tenant_and_place() -> None:
    slow = pb.SlowRequest(tenant="red", operation="match_prefix", duration_us=1_234_500, time_s=60, at="n1", peer="10.0.0.7:5")
    line = text(slow_table([slow])).splitlines()[1]
    assert line.split() == ["1,234.5", "ms", "match", "prefix", "red", "n1", "10.0.0.7:5", "00:01:00"]
    assert "No request took" in text(slow_table([]))
