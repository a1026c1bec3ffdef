"""A node's side of tickets: the keys that its masters gave it, and whether a ticket is good. Sans-I/O; time is passed in."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.errors import InvalidTicket
from kvstore.security.tickets.form import Ticket, key_id_of, unseal

MAX_KEYS: Final = 16
"""Keys kept: those of registrations and rotations so close that tickets under the oldest may not have ended."""


@dataclass(frozen=True, slots=True)
class _Key:
    secret: bytes = field(repr=False)
    born_ns: int
    """On this node's clock: as if the key had been made at the moment at which the node was given it, less the age it had then."""
    issuer: str


@dataclass(frozen=True, slots=True)
class Admission:
    """A good ticket: until when it is, on this node's clock, and which master issued it."""

    ticket: Ticket
    until_ns: int
    issuer: str


class Keyring:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, _Key] = OrderedDict()

    def add(self, key_id: int, secret: bytes, *, age_ms: int, issuer: str, now_ns: int) -> None:
        """A key that the master `issuer` made `age_ms` ago. Those before stay, for the tickets that were issued under them."""
        self._keys.pop(key_id, None)
        self._keys[key_id] = _Key(secret, now_ns - age_ms * 1_000_000, issuer)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def check(self, data: bytes, *, node_id: int, now_ns: int) -> Admission:
        """Raises InvalidTicket: it is under no key of this node, was changed, is another node's, or has ended."""
        key = self._keys.get(key_id_of(data))
        if key is None:
            raise InvalidTicket("this ticket is under no key that this node has: ask its master for another one")
        ticket = unseal(data, key.secret)
        if ticket.node_id != node_id:
            raise InvalidTicket(f"this ticket is for node {ticket.node_id}, and this is node {node_id}")
        until_ns = key.born_ns + ticket.ends_ms * 1_000_000
        if now_ns >= until_ns:
            raise InvalidTicket("this ticket has ended: ask the master for another one")
        return Admission(ticket, until_ns, key.issuer)
