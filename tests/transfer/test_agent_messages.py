"""Promises of agent_messages.py."""

import pytest

from kvstore.protocol.errors import ProtocolError
from kvstore.transfer.agent_messages import (
    Kind,
    Offer,
    kind_of,
    pack_offer,
    pack_plain,
    pack_position,
    recipient_of,
    unpack_offer,
    unpack_position,
)
from kvstore.transfer.memory import RemoteRegion

OFFER = Offer(7, RemoteRegion(3, 4096, 1 << 62, {"any": b"descriptor"}), b"metadata")


def test_an_offer_survives_the_wire() -> None:
    message = pack_offer(Kind.HELLO, 0, "any", OFFER)
    assert (kind_of(message), recipient_of(message)) == (Kind.HELLO, 0)
    assert unpack_offer(message, "any") == OFFER


def test_a_position_survives_the_wire() -> None:
    message = pack_position(Kind.DATA, 9, 1 << 40)
    assert (kind_of(message), recipient_of(message), unpack_position(message)) == (Kind.DATA, 9, 1 << 40)


def test_a_farewell_survives_the_wire() -> None:
    message = pack_plain(Kind.BYE, 9)
    assert (kind_of(message), recipient_of(message)) == (Kind.BYE, 9)


def test_the_layout_is_little_endian_and_does_not_change() -> None:
    assert pack_position(Kind.CREDIT, 2, 3).hex() == "05" + "0200000000000000" + "0300000000000000"
    assert pack_plain(Kind.REFUSED, 2).hex() == "03" + "0200000000000000"
    assert pack_offer(Kind.WELCOME, 2, "any", OFFER)[:18].hex() == "02" + "0200000000000000" + "01" + "0700000000000000"


@pytest.mark.parametrize("size", [0, 9, 43, 53])
def test_an_offer_that_is_cut_short_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_offer(pack_offer(Kind.HELLO, 0, "any", OFFER)[:size], "any")


def test_an_offer_of_another_version_is_refused() -> None:
    message = bytearray(pack_offer(Kind.HELLO, 0, "any", OFFER))
    message[9] = 2
    with pytest.raises(ProtocolError, match="version 2"):
        unpack_offer(bytes(message), "any")


def test_an_offer_of_an_empty_ring_is_refused() -> None:
    with pytest.raises(ProtocolError, match="without room"):
        unpack_offer(pack_offer(Kind.HELLO, 0, "any", OFFER._replace(ring=OFFER.ring._replace(size_bytes=0))), "any")


def test_a_position_of_another_size_is_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack_position(pack_position(Kind.DATA, 9, 1) + b"x")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProtocolError, match="kind 77"):
        kind_of(b"\x4d" + bytes(8))


def test_a_message_without_a_recipient_is_refused() -> None:
    with pytest.raises(ProtocolError):
        recipient_of(b"\1\2")
