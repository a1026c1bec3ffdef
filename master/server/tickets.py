"""Tickets of a cluster that has tokens: nodes are given keys and told what is revoked, clients tickets, and orders to copy their passes.

Without tokens there is nothing of it. The loop is the only caller.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from kvstore.master.server.node_connections import NodeConnections
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import CopyBlocks, RevokeCredentials, TicketKey
from kvstore.protocol.session_messages import Count, Ok
from kvstore.security.identity import Identity
from kvstore.security.tickets.issuer import Issuer, NodeKey

MAX_TOLD_AT_ONCE: Final = 1024
"""Messages of what is revoked that one turn of the loop sends, the rest the next ones: all tokens of a file may be exchanged, or end, in
one second, and heartbeats are not to wait until all nodes have been told of all."""
log = logging.getLogger("kvstore.master")


class TicketService:
    """See the module."""

    def __init__(
        self,
        links: NodeConnections,
        *,
        master_epoch: int,
        holds: Callable[[Identity], bool],
        ticket_ttl_s: float,
        key_ttl_s: float,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`holds` says whether what somebody has shown is still good. For the times see the settings `ticket_ttl_s` and
        `ticket_key_ttl_s`."""
        self._links = links
        self._master_epoch = master_epoch
        self._holds = holds
        self._wall_s = wall_s
        self._issuer = Issuer(ticket_ttl_s=ticket_ttl_s, key_ttl_s=key_ttl_s, random_bytes=secrets.token_bytes)

    def key_for(self, node_id: int, now_ns: int) -> pb.TicketKey:
        """A new key, of a node that registers."""
        key = self._issuer.register(node_id, now_ns)
        return pb.TicketKey(key_id=key.key_id, secret=key.secret, age_ms=key.age_ms(now_ns))

    def forget(self, node_id: int) -> None:
        self._issuer.forget(node_id)

    def linked(self, node_id: int) -> None:
        """The node begins its inventory: it is told what it has missed. Before that it takes nothing but a Welcome."""
        for tenant, credentials in self._issuer.revoked().items():
            self._tell_revoked(node_id, tenant, credentials)

    def of_nodes(self, node_ids: Sequence[int], bearer: Identity, now_ns: int) -> tuple[list[bytes], int]:
        """A ticket for each of these nodes, and for how many milliseconds they can be used."""
        left_s = bearer.expires_s - self._wall_s()
        tickets = [self._issuer.issue_ticket(node_id, bearer, left_s=left_s, now_ns=now_ns) for node_id in node_ids]
        return tickets, max(1, min(self._issuer.usable_ms, int(min(left_s, 1e6) * 1000)))

    def stamp(self, orders: Sequence[CopyBlocks], now_ns: int) -> None:
        """Give each order the pass that its source asks for."""
        for order in orders:
            order.ticket = self._issuer.issue_pass(order.source, order.tenant, order.keys, order.generations, now_ns)

    def tick(self, now_ns: int) -> None:
        """Tell nodes their next keys, and of what has been revoked."""
        for node_id, key in self._issuer.due_keys(now_ns):
            self._tell_key(node_id, key, now_ns)
        gone = (bearer for bearer in self._issuer.bearers() if not self._holds(bearer))
        for bearer in islice(gone, max(1, MAX_TOLD_AT_ONCE // max(1, len(self._links.node_ids())))):
            self._revoke(bearer, now_ns)

    def _tell_key(self, node_id: int, key: NodeKey, now_ns: int) -> None:
        message = TicketKey(self._master_epoch, key.key_id, key.age_ms(now_ns), key.secret)
        self._links.say(node_id, message, Ok, lambda has_it: self._issuer.confirm_key(node_id, key, has_it=has_it))

    def _revoke(self, bearer: Identity, now_ns: int) -> None:
        number = self._issuer.revoke(bearer, now_ns)
        log.info("nodes are told that what %s has shown is good no more", bearer)
        for node_id in self._links.node_ids():
            self._tell_revoked(node_id, bearer.name, [number])

    def _tell_revoked(self, node_id: int, tenant: str, credentials: Sequence[int]) -> None:
        """A node that does not say that it knows is hung up on: it registers again, and is told then."""

        def told(is_done: bool) -> None:
            if is_done:
                self._issuer.confirm_revoked(node_id, tenant, credentials)
            else:
                self._links.break_off(node_id, "it has not said that it knows what is revoked")

        self._links.say(node_id, RevokeCredentials(self._master_epoch, tenant, credentials), Count, told)
