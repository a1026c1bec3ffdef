"""Promises of form.py."""

from dataclasses import replace

import pytest

from kvstore.protocol.errors import InvalidTicket
from kvstore.security.tickets.ticket import MAC_BYTES, MAX_KEYS, PASS, Keyring, Ticket, fingerprint, key_id_of, seal, unseal

SECRET = bytes(range(32))
TICKET = Ticket(7, 3, 60_000, 2, 2**63 + 1, b"n" * 16, "réd")
NODE_PASS = Ticket(7, 3, 60_000, PASS, 0, b"n" * 16, "red", frozenset({1, 2**64 - 1, fingerprint(b"key", 5)}))


@pytest.mark.parametrize("ticket", [TICKET, NODE_PASS])
def test_a_ticket_comes_back_as_it_was_sealed(ticket: Ticket) -> None:
    data = seal(ticket, SECRET)
    assert key_id_of(data) == 7
    assert unseal(data, SECRET) == ticket


def test_the_bytes_are_those_of_the_document() -> None:
    data = seal(TICKET, SECRET)
    assert data[:47].hex(" ") == (
        "01 07 00 00 00 03 00 00 00 60 ea 00 00 00 00 00 00 02 01 00 00 00 00 00 00 80 " + "6e " * 16 + "04 00 00 00 00"
    )
    assert data[47:-MAC_BYTES] == bytes(32) + "réd".encode()


def test_a_ticket_names_the_certificate_it_was_issued_upon() -> None:
    ticket = replace(TICKET, certificate=bytes(range(32)))
    data = seal(ticket, SECRET)
    assert data[47:79] == ticket.certificate
    assert unseal(data, SECRET) == ticket


@pytest.mark.promise("authentication")
def test_no_byte_can_be_changed_and_no_other_secret_does() -> None:
    data = seal(NODE_PASS, SECRET)
    for at in range(1, len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(InvalidTicket, match="not from this cluster's master, or was modified"):
            unseal(bytes(changed), SECRET)
    with pytest.raises(InvalidTicket, match="or was modified"):
        unseal(data, bytes(32))


@pytest.mark.parametrize("data", [b"", b"\1" * 110, b"\2" + bytes(200)])
def test_what_is_no_ticket_is_told_from_one_without_a_key(data: bytes) -> None:
    with pytest.raises(InvalidTicket, match="the ticket is malformed"):
        key_id_of(data)


def test_a_sealed_ticket_whose_lengths_lie_is_refused_too() -> None:
    """Only who has the key can make one: a release of another form."""
    from kvstore.security.tickets import ticket as form

    body = seal(TICKET, SECRET)[:-MAC_BYTES]
    for wrong in (body + b"x", body[:-1], body[:43] + b"\xff\xff\xff\xff" + body[47:], body[:17] + b"\x04" + body[18:]):
        with pytest.raises(InvalidTicket, match="unknown format"):
            unseal(wrong + form._mac(wrong, SECRET), SECRET)
    begin = body.index(TICKET.tenant.encode())
    unreadable = body[:begin] + b"\xff" + body[begin + 1 :]
    with pytest.raises(InvalidTicket, match="tenant is not UTF-8"):
        unseal(unreadable + form._mac(unreadable, SECRET), SECRET)


S = 10**9
SECRET_KEYRING = b"s" * 32


def ticket(key_id: int = 1, *, node_id: int = 5, ends_ms: int = 10_000, secret: bytes = SECRET_KEYRING) -> bytes:
    return seal(Ticket(key_id, node_id, ends_ms, 1, 9, bytes(16), "red"), secret)


@pytest.fixture
def keyring() -> Keyring:
    made = Keyring()
    made.add(1, SECRET_KEYRING, age_ms=2000, issuer="a", now_ns=100 * S)
    return made


def test_a_good_ticket_says_who_until_when_and_by_which_master(keyring: Keyring) -> None:
    admission = keyring.check(ticket(), node_id=5, now_ns=100 * S)
    assert (admission.ticket.tenant, admission.ticket.credential, admission.issuer) == ("red", 9, "a")
    assert admission.until_ns == 108 * S, "the key was two seconds old"


def test_it_is_good_until_its_end(keyring: Keyring) -> None:
    keyring.check(ticket(), node_id=5, now_ns=108 * S - 1)
    with pytest.raises(InvalidTicket, match="has expired"):
        keyring.check(ticket(), node_id=5, now_ns=108 * S)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the ticket is malformed"),
        (ticket(2), "key is unknown to this node"),
        (ticket(secret=b"x" * 32), "or was modified"),
        (ticket(node_id=6), "for node 6, and this is node 5"),
    ],
)
def test_others_are_refused_each_for_its_reason(keyring: Keyring, data: bytes, why: str) -> None:
    with pytest.raises(InvalidTicket, match=why):
        keyring.check(data, node_id=5, now_ns=100 * S)


def test_keys_before_the_last_stay_as_many_as_are_kept(keyring: Keyring) -> None:
    for number in range(2, MAX_KEYS + 1):
        keyring.add(number, SECRET_KEYRING, age_ms=0, issuer="b", now_ns=100 * S)
    assert keyring.check(ticket(), node_id=5, now_ns=100 * S).issuer == "a"
    keyring.add(99, SECRET_KEYRING, age_ms=0, issuer="b", now_ns=100 * S)
    with pytest.raises(InvalidTicket):
        keyring.check(ticket(), node_id=5, now_ns=100 * S)
    assert keyring.check(ticket(99), node_id=5, now_ns=100 * S).issuer == "b"
    keyring.add(99, SECRET_KEYRING, age_ms=0, issuer="c", now_ns=100 * S)
    assert keyring.check(ticket(99), node_id=5, now_ns=100 * S).issuer == "c"
