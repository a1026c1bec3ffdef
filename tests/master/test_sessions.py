"""Tests of sessions.py, of a real master; by the command line: tests/cli/test_operations.py."""

from pathlib import Path

import pytest

from kvstore.master import sessions
from kvstore.master.sessions import PeerSessions, token_tables
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.session_messages import Flags
from kvstore.security.actor import Actor
from kvstore.security.identity import Identity, IdentityKind, Role
from kvstore.testing.transfer.awaited import eventually
from tests.master.running import TIMEOUT_S, NodeSide, Places, ask, master_in_thread, unix_client

ALICE = Actor("operator", "alice")


def listed(places: Places) -> list[pb.SessionStatus]:
    with places.stub() as stub:
        return [one for table in stub.Sessions(pb.SessionsRequest(), timeout=TIMEOUT_S) for one in table.sessions]


def test_peers_are_listed_with_their_requests_and_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection before its Hello is not listed."""
    monkeypatch.setattr(sessions, "MAX_TABLE", 1)
    with master_in_thread(tmp_path) as places:
        client, local, node = places.client("red"), unix_client(places), NodeSide(places)
        ask(client, Exists([b"k"]), Flags)
        first, second, third = listed(places)
        assert (first.kind, first.name, first.requests) == ("anonymous", "red", 2), "its Hello, too"
        assert first.peer.startswith("127.0.0.1:")
        assert second.peer.startswith("unix:uid ")
        assert (third.name, third.id) == ("one", 3)
        assert 0 <= first.age_s < TIMEOUT_S
        for one in (client, local, node):
            one.close()
        eventually(lambda: not listed(places), "all have hung up")


def test_end_closes_one_connection_and_is_audited(tmp_path: Path) -> None:
    with master_in_thread(tmp_path) as places:
        red, blue = places.client("red"), places.client("blue")
        master = places.master
        assert master is not None
        found = PeerSessions(master._server, master.reactor, master._trail)
        master.reactor.call(lambda: found.end(listed_id(places, "red"), ALICE), deadline_s=TIMEOUT_S)
        with pytest.raises(KVStoreError):
            ask(red, Exists([b"k"]), Flags)
        assert ask(blue, Exists([b"k"]), Flags).flags == b"\0"
        with pytest.raises(InvalidArgument, match="there is no session 99"):
            master.reactor.call(lambda: found.end(99, ALICE), deadline_s=TIMEOUT_S)
        done, failed = master.reactor.call(lambda: master.partitions[0].role_manager.audit().after(0), deadline_s=TIMEOUT_S)
        assert (done.actor, done.action, done.result) == ("alice", "session_end", "done")
        assert done.old.startswith("anonymous red at 127.0.0.1:")
        assert failed.result == "failed"
        red.close()
        blue.close()


def listed_id(places: Places, name: str) -> int:
    assert places.master is not None
    return next(one.number for one in places.master._server.sessions if getattr(one.context, "tenant", "") == name)


def test_tokens_are_sorted_and_bounded_by_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_TABLE", 2)
    identities = [
        Identity(IdentityKind.TENANT, Role.READ, "red", "bb", 5.0),
        Identity(IdentityKind.NODE, credential="cc"),
        Identity(IdentityKind.OPERATOR, Role.ADMIN, "alice", "aa"),
    ]
    tables = token_tables(identities)
    assert [len(table.tokens) for table in tables] == [2, 1]
    node, alice, red = [one for table in tables for one in table.tokens]
    assert (node.kind, node.name, node.role, node.HasField("expires_s")) == ("node", "", "", False)
    assert (alice.kind, alice.role) == ("operator", "admin")
    assert (red.kind, red.name, red.role, red.credential, red.expires_s) == ("tenant", "red", "read", "bb", 5.0)
