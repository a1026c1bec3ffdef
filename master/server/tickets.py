"""Tickets of a cluster with tokens: ticket keys and revocations for nodes, tickets for clients, passes for copy orders.

Unused while authentication is off. The loop is the only caller."""

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

MAX_REVOCATIONS: Final = 1024
"""Revocation messages sent in one tick; further ones in later ticks. All tokens of a file may be replaced or expire
at once, and heartbeats must not wait for all messages."""
log = logging.getLogger("kvstore.master")


class TicketService:
    """Issues tickets and keys, and revokes credentials."""

    def __init__(
        self,
        connections: NodeConnections,
        *,
        master_epoch: int,
        holds: Callable[[Identity], bool],
        ticket_ttl_s: float,
        key_ttl_s: float,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`holds` returns False for a revoked credential. For the times see the settings `ticket_ttl_s` and
        `ticket_key_ttl_s`."""
        self._connections = connections
        self._master_epoch = master_epoch
        self._holds = holds
        self._wall_s = wall_s
        self._issuer = Issuer(ticket_ttl_s=ticket_ttl_s, key_ttl_s=key_ttl_s, random_bytes=secrets.token_bytes)

    def key_for(self, node_id: int, now_ns: int) -> pb.TicketKey:
        """Return a new key for a node that registers."""
        key = self._issuer.register(node_id, now_ns)
        return pb.TicketKey(key_id=key.key_id, secret=key.secret, age_ms=key.age_ms(now_ns))

    def forget(self, node_id: int) -> None:
        self._issuer.forget(node_id)

    def on_inventory_begin(self, node_id: int) -> None:
        """The node begins its inventory: send it all revocations. Before that it accepts only a Welcome."""
        for tenant, credentials in self._issuer.revoked().items():
            self._send_revoked(node_id, tenant, credentials)

    def of_nodes(self, node_ids: Sequence[int], bearer: Identity, now_ns: int) -> tuple[list[bytes], int]:
        """Return a ticket for each of these nodes, and for how many milliseconds they are valid."""
        left_s = bearer.expires_s - self._wall_s()
        tickets = [self._issuer.issue_ticket(node_id, bearer, left_s=left_s, now_ns=now_ns) for node_id in node_ids]
        return tickets, max(1, min(self._issuer.usable_ms, int(min(left_s, 1e6) * 1000)))

    def stamp(self, orders: Sequence[CopyBlocks], now_ns: int) -> None:
        """Set each order's pass for its source."""
        for order in orders:
            order.ticket = self._issuer.issue_pass(order.source, order.tenant, order.keys, order.generations, now_ns)

    def run_due(self, now_ns: int) -> None:
        """Send nodes their next keys, and revocations."""
        for node_id, key in self._issuer.due_keys(now_ns):
            self._send_key(node_id, key, now_ns)
        gone = (bearer for bearer in self._issuer.bearers() if not self._holds(bearer))
        for bearer in islice(gone, max(1, MAX_REVOCATIONS // max(1, len(self._connections.node_ids())))):
            self._revoke(bearer, now_ns)

    def _send_key(self, node_id: int, key: NodeKey, now_ns: int) -> None:
        message = TicketKey(self._master_epoch, key.key_id, key.age_ms(now_ns), key.secret)
        self._connections.notify(node_id, message, Ok, lambda has_it: self._issuer.confirm_key(node_id, key, has_it=has_it))

    def _revoke(self, bearer: Identity, now_ns: int) -> None:
        number = self._issuer.revoke(bearer, now_ns)
        log.info("revoking the credential of %s at all nodes", bearer)
        for node_id in self._connections.node_ids():
            self._send_revoked(node_id, bearer.name, [number])

    def _send_revoked(self, node_id: int, tenant: str, credentials: Sequence[int]) -> None:
        """Send revocations. A node that does not acknowledge them is disconnected: it registers again, and gets them
        then."""

        def on_reply(is_done: bool) -> None:
            if is_done:
                self._issuer.confirm_revoked(node_id, tenant, credentials)
            else:
                self._connections.disconnect(node_id, "it did not acknowledge a revocation")

        self._connections.notify(node_id, RevokeCredentials(self._master_epoch, tenant, credentials), Count, on_reply)
