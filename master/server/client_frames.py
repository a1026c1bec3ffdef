"""Handlers of clients' messages: lookups, reservations, removals and pins. The hot path.

They call the directory, pass its operations to the committer, and send its commands to nodes. The loop is the only
caller."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from kvstore.master.audit_trail import Change
from kvstore.master.directory.limits.pins import PinResult
from kvstore.master.directory.placement.commands import NodeCommands
from kvstore.master.server.copy_causes import CopyReasons
from kvstore.master.server.node_connections import Answers
from kvstore.master.server.owner_parts import OwnerParts
from kvstore.master.server.time_slices import TimeSlicer
from kvstore.protocol.catalog_messages import DeleteBlocks
from kvstore.protocol.errors import InvalidArgument, KVStoreError, QuotaExceeded, Unauthorized
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.master_messages import (
    CancelReservations,
    Exists,
    Lookup,
    MatchPrefix,
    Nodes,
    NodeTable,
    Pin,
    PinFor,
    Remove,
    RemoveMatching,
    Replicate,
    Reserve,
    check_pattern,
)
from kvstore.protocol.session_messages import Count, Flags, Ok
from kvstore.rpc.server.session import Session
from kvstore.rpc.tracing import TraceSpan, call_within_spans
from kvstore.security.actor import CLIENT, Actor, host_of
from kvstore.security.identity import Identity, IdentityKind

KeyRequest = TypeVar("KeyRequest", Lookup, Exists, MatchPrefix, Reserve, Pin, PinFor, Replicate, Remove)

SLICE_ROWS: Final = 2048
"""Rows read in one time slice, half a millisecond; also blocks removed or replicated in one. A node drops as many, each in
DRAM and on NVMe, in 35 ms of its loop."""
MAX_TABLE_BLOB_BYTES: Final = 32 << 20
"""Transfer descriptions in one node table: the rest of a body's 40 MiB is for the other columns."""


@dataclass(slots=True)
class ClientPeer:
    """Context of a client's session."""

    tenant: str
    identity: Identity
    allowed: frozenset[int]
    """Frame types that it may send."""
    reserved: tuple[Sequence[bytes], Sequence[int]] = ((), ())
    """Keys and generations of the last Reserve: a client that disconnects may not have received the response."""


class ClientFrames:
    """Handlers of clients' messages. Counts `keys` and `lookup_misses` in `counters`."""

    def __init__(self, owner: OwnerParts, causes: CopyReasons, order_copies: Callable[[int], None]) -> None:
        """`order_copies(now_ns)` orders missing replicas; `causes` records traced requests for them. The audit trail
        gets removals of whole namespaces, and operators' pins and removals."""
        self._directory, self._committer, self._connections, self._tickets = (
            owner.directory,
            owner.committer,
            owner.connections,
            owner.tickets,
        )
        self._counters, self._recovery_barrier, self._trail = owner.counters, owner.recovery_barrier, owner.trail
        self._causes = causes
        self._order_copies = order_copies

    def lookup(self, session: Session, header: FrameHeader, message: Lookup) -> None:
        if self._recovery_barrier.awaited and self._is_parked(session, header, message, self.lookup):
            return
        self._counters["keys"] += len(message.keys)
        found = self._directory.queries.lookup(_tenant(session), message.keys, avoid=message.avoid)
        self._counters["lookup_misses"] += found.replicas.count(0)
        session.reply(header.request_id, found)

    def exists(self, session: Session, header: FrameHeader, message: Exists) -> None:
        if self._recovery_barrier.awaited and self._is_parked(session, header, message, self.exists):
            return
        self._counters["keys"] += len(message.keys)
        session.reply(header.request_id, Flags(self._directory.queries.exists(_named_tenant(session), message.keys)))

    def match_prefix(self, session: Session, header: FrameHeader, message: MatchPrefix) -> None:
        if self._recovery_barrier.awaited and self._is_parked(session, header, message, self.match_prefix):
            return
        self._counters["keys"] += len(message.keys)
        session.reply(header.request_id, Count(self._directory.queries.match_prefix(_tenant(session), message.keys)))

    def _is_parked(
        self,
        session: Session,
        header: FrameHeader,
        message: KeyRequest,
        ask: Callable[[Session, FrameHeader, KeyRequest], None],
        *,
        needs_connection: bool = False,
    ) -> bool:
        retry = partial(ask, session, header, message)
        return self._recovery_barrier.park(session, header, _tenant(session), message.keys, retry, needs_connection=needs_connection)

    def reserve(self, session: Session, header: FrameHeader, message: Reserve) -> None:
        if self._recovery_barrier.awaited and self._is_parked(session, header, message, self.reserve):
            return
        self._counters["keys"] += len(message.keys)
        client = _client(session)
        grants = self._directory.reserve(
            client.tenant,
            message.keys,
            message.sizes,
            local_node=message.local_node,
            avoid=message.avoid,
            now_ns=session.reactor.now_ns(),
        )
        client.reserved = message.keys, grants.generations
        session.reply(header.request_id, grants)

    def cancel(self, session: Session, header: FrameHeader, message: CancelReservations) -> None:
        self._directory.cancel(_tenant(session), message.keys, message.generations)
        session.reply(header.request_id, Ok())

    def nodes(self, session: Session, header: FrameHeader, message: Nodes) -> None:
        if self._recovery_barrier.awaited and self._recovery_barrier.park_all(
            session, header, partial(self.nodes, session, header, message)
        ):
            return
        client, live = _client(session), self._directory.members.live()
        tickets, ticket_ms = [b""] * len(live), 0
        if self._tickets is not None:
            tickets, ticket_ms = self._tickets.of_nodes([node.node_id for node in live], client.identity, session.reactor.now_ns())
        table = NodeTable(
            [node.node_id for node in live],
            [node.info.name for node in live],
            [node.info.host_id for node in live],
            [node.info.unix for node in live],
            [node.info.tcp for node in live],
            [node.revision for node in live],
            _within([node.description.transfer for node in live], MAX_TABLE_BLOB_BYTES),
            tickets,
            ticket_ms,
        )
        session.reply(header.request_id, table)

    def pin(self, session: Session, header: FrameHeader, message: Pin) -> None:
        """Responds when the pins are durable and the nodes have acknowledged them."""
        if self._recovery_barrier.awaited and self._is_parked(session, header, message, self.pin, needs_connection=True):
            return
        pin_result = self._directory.pins.pin(_named_tenant(session), message.keys, pinned=bool(message.pinned))
        self._pinned(session, header, message, pin_result, pinned=bool(message.pinned))

    def pin_for(self, session: Session, header: FrameHeader, message: PinFor) -> None:
        """As `pin`."""
        if self._recovery_barrier.awaited and self._is_parked(session, header, message, self.pin_for, needs_connection=True):
            return
        ttl_ns, now_ns = message.ttl_ms * 1_000_000, session.reactor.now_ns()
        pin_result = self._directory.pins.pin_for(_named_tenant(session), message.keys, ttl_ns=ttl_ns, now_ns=now_ns)
        self._pinned(session, header, message, pin_result, pinned=True)

    def replicate(self, session: Session, header: FrameHeader, message: Replicate) -> None:
        """Responds when the targets are durable; copies that can be made at once have been ordered then."""
        if self._recovery_barrier.awaited and self._is_parked(session, header, message, self.replicate, needs_connection=True):
            return
        tenant, flags, is_new = _tenant(session), bytearray(), False

        def ask(keys: Sequence[bytes], done: Callable[[int], None]) -> None:
            nonlocal is_new
            asked = self._directory.targets.ask(tenant, keys, message.count)
            flags.extend(asked.flags)
            if asked.ops:
                is_new = True
                self._committer.commit(asked.ops)
            done(0)

        def asked(_count: int) -> None:
            if not is_new:
                session.reply(header.request_id, Flags(bytes(flags)))
                return
            now_ns, span = session.reactor.now_ns(), session.span(header.request_id)
            if span is not None:
                self._causes.note(tenant, message.keys, span, now_ns)
            self._order_copies(now_ns)
            self._committer.commit((), lambda: session.reply(header.request_id, Flags(bytes(flags))))

        TimeSlicer(session.reactor.call_soon, lambda: session.is_open).of(_slices(message.keys), ask, asked)

    def _pinned(self, session: Session, header: FrameHeader, message: Pin | PinFor, pin_result: PinResult, *, pinned: bool) -> None:
        tenant = _tenant(session)

        def on_answers(answers: Answers) -> None:
            flags = self._held(tenant, message.keys, pin_result, answers) if pinned else pin_result.flags
            self._audit_keys(session, "pin" if pinned else "unpin", flags)
            session.reply(header.request_id, Flags(flags))

        def durable() -> None:
            self._command(session.span(header.request_id), pin_result.commands, on_answers)

        self._committer.commit(pin_result.ops, durable)

    def _held(self, tenant: str, keys: Sequence[bytes], pin_result: PinResult, answers: Answers) -> bytes:
        return self._directory.pins.held(tenant, keys, pin_result, ((command.keys, flags) for _node_id, command, flags in answers))

    def expire_pins(self, now_ns: int) -> None:
        """End pins whose time is over."""
        ended = self._directory.pins.expire(now_ns)
        if ended.ops:
            self._committer.commit(ended.ops, lambda: self._connections.send(ended.commands))

    def remove(self, session: Session, header: FrameHeader, message: Remove) -> None:
        """Responds when every holder has dropped its block, or refused since it is in use."""
        if self._recovery_barrier.awaited and self._is_parked(session, header, message, self.remove, needs_connection=True):
            return
        tenant, span, gone = _named_tenant(session), session.span(header.request_id), dict[bytes, int]()
        keys = list(dict.fromkeys(message.keys))

        def remove(part: Sequence[bytes], done: Callable[[int], None]) -> None:
            self._remove(tenant, part, bool(message.force), partial(removed, part), span)
            done(0)  # an unresponsive node delays all slices at once

        def removed(part: Sequence[bytes], flags: bytes) -> None:
            gone.update(zip(part, flags, strict=True))
            if len(gone) == len(keys):
                flags = bytes(map(gone.__getitem__, message.keys))
                self._audit_keys(session, "remove", flags)
                session.reply(header.request_id, Flags(flags))

        if keys:
            TimeSlicer(session.reactor.call_soon, lambda: True).of(_slices(keys), remove, lambda _count: None)
        else:
            removed((), b"")

    def remove_matching(self, session: Session, header: FrameHeader, message: RemoveMatching) -> None:
        """Responds when all rows have been checked, and matching blocks removed as by `remove`."""
        check_pattern(message.pattern)
        tenant = _named_tenant(session)
        if self._recovery_barrier.awaited and self._recovery_barrier.park_all(
            session, header, partial(self.remove_matching, session, header, message)
        ):
            return
        namespace = None if message.any_namespace else message.namespace

        def removed(count: int) -> None:
            of = "all namespaces" if namespace is None else f"namespace {namespace or '(none)'}"
            which = "" if message.pattern == "*" else f", keys {message.pattern}"
            self._audit(session, "remove", f"{of} of tenant {tenant or '(none)'}{which}", f"{count:,} blocks")
            session.reply(header.request_id, Count(count))

        slicer = TimeSlicer(session.reactor.call_soon, lambda: session.is_open)
        self.remove_all(tenant, namespace, message.pattern, is_forced=bool(message.force), slicer=slicer, then=removed)

    def _audit_keys(self, session: Session, action: str, flags: bytes) -> None:
        """Record an operator's change of single blocks. Engines' changes of their own blocks are not recorded."""
        identity = _client(session).identity
        if identity.is_admin and identity.kind is not IdentityKind.ANONYMOUS:
            self._audit(session, action, f"keys of tenant {_tenant(session) or '(none)'}", f"{flags.count(1):,} of {len(flags):,} keys")

    def _audit(self, session: Session, action: str, target: str, detail: str) -> None:
        actor = Actor.of(_client(session).identity, peer=host_of(session.peer()), via=CLIENT)
        self._trail.repeated(Change(actor, action, target), detail)

    def remove_all(
        self, tenant: str, namespace: str | None, pattern: str, *, is_forced: bool, slicer: TimeSlicer, then: Callable[[int], None]
    ) -> None:
        """Remove the matching blocks of one namespace or all (None), and call `then` with the number of removed
        ones."""

        def remove(keys: Sequence[bytes], done: Callable[[int], None]) -> None:
            self._remove(tenant, keys, is_forced, lambda gone: done(gone.count(1)))

        slicer.of(self._directory.queries.held_keys(tenant, namespace, pattern, slice_rows=SLICE_ROWS), remove, then)

    def pin_all(self, tenant: str, namespace: str, *, pinned: bool, slicer: TimeSlicer, then: Callable[[int | KVStoreError], None]) -> None:
        """Pin or unpin the blocks of a namespace, and call `then` with their number. Beyond the tenant's limit
        `then` gets the error; blocks pinned before stay pinned."""
        pins = self._directory.pins

        def pin(keys: Sequence[bytes], done: Callable[[int], None]) -> None:
            unpinned = pins.unpinned(tenant, keys)
            try:
                pin_result = pins.pin(tenant, keys, pinned=pinned)
            except QuotaExceeded as error:
                then(error)
                return

            def on_answers(answers: Answers) -> None:
                done(self._held(tenant, keys, pin_result, answers).count(1) if pinned else len(keys) - unpinned)

            def durable() -> None:
                self._connections.command(pin_result.commands, on_answers)

            self._committer.commit(pin_result.ops, durable)

        slices = self._directory.queries.list_keys(tenant, namespace, slice_rows=SLICE_ROWS)
        slicer.of(([key for key, _size, _namespace in part] for part in slices), pin, then)

    def _command(self, span: TraceSpan | None, commands: NodeCommands, then: Callable[[Answers], None]) -> None:
        """Send commands on behalf of a request, traced if that is."""
        call_within_spans((span,) if span is not None else (), self._connections.command, commands, then)

    def _remove(
        self, tenant: str, keys: Sequence[bytes], force: bool, then: Callable[[bytes], None], span: TraceSpan | None = None
    ) -> None:
        """Remove blocks, and call `then` with 1 for each key that existed and is gone."""
        removal = self._directory.removing.plan(tenant, keys, force=force)

        def on_answers(answers: Answers) -> None:
            unknown: set[bytes] = set()  # a node without a response may still have them, even if unreachable now
            for node_id, command, flags in answers:
                assert isinstance(command, DeleteBlocks)
                if flags is None:
                    unknown.update(command.keys)
                else:
                    self._committer.commit(self._directory.removing.dropped(node_id, tenant, command.keys, command.generations, flags))
            self._directory.removing.over(tenant, removal)
            left = self._directory.queries.exists(tenant, keys)
            then(bytes(was and not still and key not in unknown for was, still, key in zip(removal.flags, left, keys, strict=True)))

        def durable() -> None:
            if removal.raises_horizons:
                self._committer.commit(self._directory.horizons_written())
            self._command(span, removal.commands, on_answers)

        self._committer.commit(removal.ops, durable)

    def closed(self, peer: ClientPeer) -> None:
        """Cancel a client's last reservations: it may have been interrupted before it received them."""
        self._directory.cancel(peer.tenant, *peer.reserved)


def _slices(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[begin : begin + SLICE_ROWS] for begin in range(0, len(keys), SLICE_ROWS))


def _within(blobs: Sequence[bytes], max_bytes: int) -> list[bytes]:
    """Return the blobs, empty from where they exceed `max_bytes`: such nodes are reached at their TCP address."""
    total_bytes = itertools.accumulate(map(len, blobs))
    return [blob if total <= max_bytes else b"" for blob, total in zip(blobs, total_bytes, strict=True)]


def _client(session: Session) -> ClientPeer:
    peer = session.context
    if not isinstance(peer, ClientPeer):
        raise Unauthorized("no Hello as a client was sent on this connection: send it first")
    return peer


def _tenant(session: Session) -> str:
    return _client(session).tenant


def _named_tenant(session: Session) -> str:
    """Return the tenant of a request that operators may send, too. Raises InvalidArgument if an operator named none."""
    peer = _client(session)
    if not peer.tenant and peer.identity.kind is IdentityKind.OPERATOR:
        raise InvalidArgument("an operator has no blocks of its own: name the tenant whose blocks are meant (--tenant NAME)")
    return peer.tenant
