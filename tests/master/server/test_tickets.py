"""Tests of tickets.py: a real master with tokens, its gRPC and its frames, and a node's side of both that notes every byte."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import PHASE_SYNC_BEGIN, CopyBlocks, RevokeCredentials, TicketKey
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Count, Failure, Flags, Ok
from kvstore.security.actor import THIS_MASTER
from kvstore.security.tickets.ticket import Ticket, fingerprint, key_id_of, unseal
from kvstore.testing.transfer.awaited import eventually
from tests.credentials import JOIN, tokens_file, tokens_text
from tests.master.blocks import Event, publish
from tests.master.running import TIMEOUT_S, NodeSide, Places, master_in_thread
from tests.rpc.wires import frame
from tests.tickets import node_table

TENANTS = {"red": "red's secret", "blue": "blue's secret"}
TICKET_S = 40.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokens_file(tmp_path, TENANTS)
    return tmp_path


@pytest.fixture
def places(folder: Path) -> Iterator[Places]:
    with master_in_thread(
        folder / "run", tokens=str(folder / "tokens.toml"), tokens_check_interval_s=0.05, ticket_ttl_s=TICKET_S, ticket_key_ttl_s=1e6
    ) as found:
        yield found


class Node(NodeSide):
    """Notes what it is sent, and knows its keys."""

    def __init__(self, places: Places, name: str = "one") -> None:
        self.heard = b""
        super().__init__(places, name, token=JOIN)
        key = self.registration.ticket_key
        self.keys = {key.key_id: key.secret}

    def _exactly(self, size: int) -> bytes:
        data = super()._exactly(size)
        self.heard += data
        return data

    def open(self, ticket: bytes) -> Ticket:
        return unseal(ticket, self.keys[key_id_of(ticket)])


@pytest.fixture
def node(places: Places) -> Iterator[Node]:
    made = Node(places)
    made.sync()
    yield made
    made.close()


def ticket_of(places: Places, tenant: str = "red", name: str = "one") -> bytes:
    table = node_table(places.listen, tenant, TENANTS[tenant])
    return table.tickets[list(table.names).index(name)]


@pytest.mark.promise("authentication")
def test_client_gets_a_ticket_for_each_node_with_its_ttl(places: Places, node: Node) -> None:
    other = Node(places, "two")
    other.sync()
    table = node_table(places.listen, "red", TENANTS["red"])
    tickets = dict(zip(table.names, table.tickets, strict=True))
    for side, name in ((node, "one"), (other, "two")):
        ticket = side.open(tickets[name])
        assert (ticket.tenant, ticket.role, ticket.node_id) == ("red", 2, side.registration.node_id)
    with pytest.raises(KeyError):
        other.open(tickets["one"])
    assert 0 < table.ticket_ms <= TICKET_S * 1000
    other.close()


@pytest.mark.promise("authentication")
def test_no_token_and_no_digest_of_a_tenant_reaches_a_node(places: Places, node: Node) -> None:
    """All that the master says to a node: its registration, a heartbeat, and what comes over the link while copies are ordered."""
    said = node.beat().SerializeToString()
    node.publish(Event(b"a", tenant="red"))
    other = Node(places, "two")
    other.sync()
    places.replicate("red", [b"a"], node_id=other.registration.node_id, source_node_id=node.registration.node_id)
    header, _body = other.read()
    assert header.type == CopyBlocks.TYPE
    other.answer(header, Flags(b"\1"))
    said += node.registration.SerializeToString() + other.registration.SerializeToString() + node.heard + other.heard
    assert other.registration.ticket_key.secret in said, "what is looked for would be found"
    for token in TENANTS.values():
        digest = hashlib.sha256(token.encode()).digest()
        for secret in (token.encode(), digest, digest.hex().encode(), digest[:8]):
            assert secret not in said
    other.close()


@pytest.mark.promise("authentication")
def test_copy_order_has_a_pass_for_its_blocks(places: Places, node: Node) -> None:
    node.publish(Event(b"a", tenant="red"), Event(b"b", tenant="red"))
    other = Node(places, "two")
    other.sync()
    places.replicate("red", [b"a"], node_id=other.registration.node_id, source_node_id=node.registration.node_id)
    _header, body = other.read()
    order = CopyBlocks.unpack(body)
    shown = node.open(order.ticket)
    assert (shown.tenant, shown.role, shown.node_id) == ("red", 0, node.registration.node_id)
    assert shown.blocks == {fingerprint(b"a", order.generations[0])}
    with pytest.raises(KeyError):
        other.open(order.ticket)
    other.close()


def read_word(node: Node, kind: type[Message]) -> Message:
    header, body = node.read()
    assert header.type == kind.TYPE
    node.answer(header, Count(0) if kind is RevokeCredentials else Ok())
    return kind.unpack(body)


def test_next_key_is_used_once_acknowledged(folder: Path) -> None:
    with master_in_thread(folder / "run", tokens=str(folder / "tokens.toml"), ticket_key_ttl_s=1.0) as places:
        node = Node(places)
        node.sync()
        header, body = node.read()
        told = TicketKey.unpack(body)
        assert (header.type, told.epoch) == (TicketKey.TYPE, places.epoch)
        assert key_id_of(ticket_of(places)) in node.keys, "the node may not have it yet"
        node.keys[told.key_id] = told.secret
        node.answer(header, Ok())
        eventually(lambda: key_id_of(ticket_of(places)) == told.key_id, "tickets under the new key")
        node.open(ticket_of(places))
        node.close()


@pytest.mark.promise("authentication")
def test_removed_token_is_revoked_again_at_returning_nodes(places: Places, node: Node, folder: Path) -> None:
    red, blue = node.open(ticket_of(places)), node.open(ticket_of(places, "blue"))
    (folder / "tokens.toml").write_text(tokens_text({"red": "another", "blue": TENANTS["blue"]}))
    revoke = read_word(node, RevokeCredentials)
    assert isinstance(revoke, RevokeCredentials)
    assert (revoke.tenant, list(revoke.credentials)) == ("red", [red.credential])
    node.close()
    retry = Node(places)
    retry.sock.sendall(frame(publish(retry.registration.registration_epoch, [], PHASE_SYNC_BEGIN)))
    told = read_word(retry, RevokeCredentials)
    assert isinstance(told, RevokeCredentials)
    assert list(told.credentials) == [red.credential] != [blue.credential]
    retry.close()


def test_revocation_waits_for_unacknowledged_nodes(places: Places, node: Node, folder: Path) -> None:
    other = Node(places, "two")
    other.sync()
    credential = node.open(ticket_of(places)).credential
    (folder / "tokens.toml").write_text(tokens_text({"red": "another", "blue": TENANTS["blue"]}))
    master = places.master
    assert master is not None

    def untold() -> set[int]:
        tickets = master.partitions[0].role_manager.leader().frames.tickets
        assert tickets is not None
        return set(master.reactor.call(lambda: tickets._issuer._revoked["red", credential].unconfirmed, deadline_s=TIMEOUT_S))

    read_word(node, RevokeCredentials)
    eventually(lambda: untold() == {other.registration.node_id}, "one of two knows")
    read_word(other, RevokeCredentials)
    eventually(lambda: untold() == set(), "both know")
    other.close()


@pytest.mark.promise("authentication")
def test_a_node_that_does_not_say_that_it_knows_is_hung_up_on(places: Places, node: Node, folder: Path) -> None:
    ticket_of(places)
    (folder / "tokens.toml").write_text(tokens_text({"red": "another", "blue": TENANTS["blue"]}))
    header, _body = node.read()
    assert header.type == RevokeCredentials.TYPE
    node.answer(header, Failure(1, "it cannot"))
    with pytest.raises(AssertionError, match="the master hung up"):
        node.read()


def test_a_node_that_is_forgotten_has_no_key_any_more(places: Places, node: Node) -> None:
    master = places.master
    assert master is not None
    node.close()

    def forget() -> None:
        master.partitions[0].role_manager.leader().forget("one", THIS_MASTER)

    eventually(lambda: not node_table(places.listen, "red", TENANTS["red"]).names, "the master knows that it is gone")
    master.reactor.call(forget, deadline_s=TIMEOUT_S)
    tickets = master.partitions[0].role_manager.leader().frames.tickets
    assert tickets is not None
    assert master.reactor.call(lambda: tickets._issuer.due_keys(2**62), deadline_s=TIMEOUT_S) == []
