"""Promises of issuer.py, with counted randomness and a clock of the test's own."""

import itertools
import math
from dataclasses import replace

import pytest

from kvstore.security.identity import Identity, IdentityKind, Role
from kvstore.security.tickets import issuer as issuing
from kvstore.security.tickets.issuer import PASS_TTL_S, Issuer, NodeKey
from kvstore.security.tickets.ticket import Ticket, fingerprint, unseal

S = 10**9
RED = Identity(IdentityKind.TENANT, Role.READ, "red", "first")


def issuer(**options: float) -> Issuer:
    numbers = itertools.count(1)
    return Issuer(
        ticket_ttl_s=options.get("ticket_ttl_s", 100.0),
        key_ttl_s=options.get("key_ttl_s", 1000.0),
        random_bytes=lambda size: next(numbers).to_bytes(size, "little"),
    )


def read(data: bytes, key: NodeKey) -> Ticket:
    return unseal(data, key.secret)


def test_ticket_has_tenant_role_node_and_expires() -> None:
    made = issuer()
    key = made.register(5, 10 * S)
    ticket = read(made.issue_ticket(5, RED, left_s=math.inf, now_ns=13 * S), key)
    assert (ticket.key_id, ticket.node_id, ticket.tenant, ticket.role) == (key.key_id, 5, "red", Role.READ)
    assert ticket.ends_ms == 103_000, "from the making of its key"
    assert key.age_ms(13 * S) == 3000
    assert made.usable_ms == 75_000


def test_ticket_expires_with_its_credential() -> None:
    made = issuer()
    key = made.register(5, 0)
    assert read(made.issue_ticket(5, RED, left_s=7.5, now_ns=0), key).ends_ms == 7500


def test_equal_credentials_share_a_ticket_for_a_quarter_of_ttl() -> None:
    made = issuer()
    made.register(5, 0)
    made.register(6, 0)

    def ticket(now_s: int, who: Identity = RED, node_id: int = 5) -> bytes:
        return made.issue_ticket(node_id, who, left_s=math.inf, now_ns=now_s * S)

    first = ticket(0)
    assert ticket(24) == first
    assert ticket(25) != first
    others = [
        Identity(IdentityKind.TENANT, Role.READ, "red", "second"),
        Identity(IdentityKind.TENANT, Role.WRITE, "red", "first"),
        Identity(IdentityKind.TENANT, Role.READ, "blue", "first"),
    ]
    assert len({ticket(26), ticket(26, node_id=6), *(ticket(26, who) for who in others)}) == 5


@pytest.mark.promise("authentication")
def test_each_registration_of_a_node_has_its_own_key() -> None:
    made = issuer()
    keys = [made.register(5, 0), made.register(6, 0), made.register(5, 0)]
    assert len({key.secret for key in keys}) == len({key.key_id for key in keys}) == 3
    assert read(made.issue_ticket(5, RED, left_s=9, now_ns=0), keys[2]).key_id == keys[2].key_id
    assert "secret" not in repr(keys[0])


def test_next_key_is_used_once_the_node_has_it() -> None:
    made = issuer()
    first = made.register(5, 0)
    assert made.due_keys(999 * S) == []
    [(node_id, second)] = made.due_keys(1000 * S)
    assert node_id == 5
    assert made.due_keys(1001 * S) == [], "it is being told"
    before = made.issue_ticket(5, RED, left_s=9, now_ns=1001 * S)
    assert read(before, first).key_id == first.key_id
    made.confirm_key(5, second, has_it=False)
    [(_, third)] = made.due_keys(1002 * S)
    made.confirm_key(5, second, has_it=True)
    assert made.issue_ticket(5, RED, left_s=9, now_ns=1001 * S) == before, "an answer about another key changes nothing"
    made.confirm_key(5, third, has_it=True)
    assert read(made.issue_ticket(5, RED, left_s=9, now_ns=1003 * S), third).ends_ms == 10_000
    made.confirm_key(6, third, has_it=True)


def test_a_pass_is_for_one_tenants_blocks_at_their_source() -> None:
    made = issuer()
    key = made.register(5, 0)
    shown = read(made.issue_pass(5, "red", [b"a", b"b"], [1, 2], 4 * S), key)
    assert (shown.node_id, shown.tenant, shown.role) == (5, "red", 0)
    assert shown.ends_ms == (4 + PASS_TTL_S) * 1000
    assert shown.blocks == {fingerprint(b"a", 1), fingerprint(b"b", 2)}


def test_revocation_is_kept_for_nodes_that_return() -> None:
    made = issuer()
    key = made.register(5, 0)
    second = Identity(IdentityKind.TENANT, Role.READ, "red", "second")
    before = made.issue_ticket(5, RED, left_s=9, now_ns=0)
    other = made.issue_ticket(5, second, left_s=9, now_ns=0)
    assert made.bearers() == [RED, second]
    number = made.revoke(RED, 0)
    assert number == read(before, key).credential != read(other, key).credential
    assert made.bearers() == [second]
    assert made.revoked() == {"red": [number]}
    again = read(made.issue_ticket(5, RED, left_s=9, now_ns=0), key)
    assert again.credential != number, "a credential of that name that is let in anew is another one"


def test_each_certificate_has_own_tickets_under_one_number() -> None:
    """So nodes find a certificate that is revoked by themselves, and a revoked token ends them all."""
    made = issuer()
    key = made.register(5, 0)

    def shown(certificate: bytes) -> bytes:
        return made.issue_ticket(5, replace(RED, certificate=certificate), left_s=9, now_ns=0)

    first, second = shown(b"1" * 32), shown(b"2" * 32)
    assert [read(ticket, key).certificate for ticket in (first, second)] == [b"1" * 32, b"2" * 32]
    assert read(first, key).credential == read(second, key).credential
    assert made.bearers() == [RED]
    assert shown(b"1" * 32) == first
    made.revoke(RED, 0)
    assert shown(b"1" * 32) != first


def test_tickets_that_are_kept_for_certificates_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuing, "MAX_CERTIFICATES", 2)
    made = issuer()
    made.register(5, 0)
    tickets = [made.issue_ticket(5, replace(RED, certificate=bytes([n] * 32)), left_s=9, now_ns=0) for n in (1, 2, 3)]
    assert made.issue_ticket(5, replace(RED, certificate=bytes([3] * 32)), left_s=9, now_ns=0) == tickets[2]
    assert made.issue_ticket(5, replace(RED, certificate=bytes([1] * 32)), left_s=9, now_ns=0) != tickets[0]


def revoke(made: Issuer, at_s: int, name: str = "first") -> int:
    """A credential of red that has had a ticket at node 5."""
    bearer = Identity(IdentityKind.TENANT, Role.READ, "red", name)
    made.issue_ticket(5, bearer, left_s=math.inf, now_ns=at_s * S)
    return made.revoke(bearer, at_s * S)


def test_revocation_known_to_all_nodes_is_dropped_after_ttl() -> None:
    made = issuer()
    made.register(5, 0)
    made.register(6, 0)
    first = revoke(made, 0)
    for node_id in (5, 6, 7):
        made.confirm_revoked(node_id, "red", [first, 77])
    second = revoke(made, 99)
    assert made.revoked() == {"red": [first, second]}, "a former master's ticket may have let red in at a node that is to register yet"
    third = revoke(made, 100)
    assert made.revoked() == {"red": [second, third]}


def test_no_more_than_so_much_that_is_revoked_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuing, "MAX_REVOKED", 2)
    made = issuer()
    made.register(5, 0)
    numbers = [revoke(made, at_s, f"token {at_s}") for at_s in range(4)]
    assert made.revoked() == {"red": numbers[2:]}
