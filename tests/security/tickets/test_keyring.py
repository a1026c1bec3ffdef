"""Promises of keyring.py: what a node takes for a ticket, by a clock of the test's own."""

import pytest

from kvstore.protocol.errors import InvalidTicket
from kvstore.security.tickets.form import Ticket, seal
from kvstore.security.tickets.keyring import MAX_KEYS, Keyring

S = 10**9
SECRET = b"s" * 32


def ticket(key_id: int = 1, *, node_id: int = 5, ends_ms: int = 10_000, secret: bytes = SECRET) -> bytes:
    return seal(Ticket(key_id, node_id, ends_ms, 1, 9, bytes(16), "red"), secret)


@pytest.fixture
def keyring() -> Keyring:
    made = Keyring()
    made.add(1, SECRET, age_ms=2000, issuer="a", now_ns=100 * S)
    return made


def test_a_good_ticket_says_who_until_when_and_by_which_master(keyring: Keyring) -> None:
    admission = keyring.check(ticket(), node_id=5, now_ns=100 * S)
    assert (admission.ticket.tenant, admission.ticket.credential, admission.issuer) == ("red", 9, "a")
    assert admission.until_ns == 108 * S, "the key was two seconds old"


def test_it_is_good_until_its_end(keyring: Keyring) -> None:
    keyring.check(ticket(), node_id=5, now_ns=108 * S - 1)
    with pytest.raises(InvalidTicket, match="has ended"):
        keyring.check(ticket(), node_id=5, now_ns=108 * S)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "this is no ticket"),
        (ticket(2), "under no key that this node has"),
        (ticket(secret=b"x" * 32), "or was changed"),
        (ticket(node_id=6), "for node 6, and this is node 5"),
    ],
)
def test_others_are_refused_each_for_its_reason(keyring: Keyring, data: bytes, why: str) -> None:
    with pytest.raises(InvalidTicket, match=why):
        keyring.check(data, node_id=5, now_ns=100 * S)


def test_keys_before_the_last_stay_as_many_as_are_kept(keyring: Keyring) -> None:
    for number in range(2, MAX_KEYS + 1):
        keyring.add(number, SECRET, age_ms=0, issuer="b", now_ns=100 * S)
    assert keyring.check(ticket(), node_id=5, now_ns=100 * S).issuer == "a"
    keyring.add(99, SECRET, age_ms=0, issuer="b", now_ns=100 * S)
    with pytest.raises(InvalidTicket):
        keyring.check(ticket(), node_id=5, now_ns=100 * S)
    assert keyring.check(ticket(99), node_id=5, now_ns=100 * S).issuer == "b"
    keyring.add(99, SECRET, age_ms=0, issuer="c", now_ns=100 * S)
    assert keyring.check(ticket(99), node_id=5, now_ns=100 * S).issuer == "c"
