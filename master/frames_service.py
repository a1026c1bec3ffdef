"""The master's frames: lookups, reservations, removals and pins of clients, and what nodes publish. The hot path.

It turns messages into calls of the directory, gives what must be durable to the committer, and carries the directory's commands to
the nodes over their own connections. The loop is the only caller.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.master.catalogs.committing import Committer
from kvstore.master.directory.commands import Commands
from kvstore.master.directory.directory import Directory
from kvstore.protocol.catalog_messages import EVENT_COMMIT, PHASE_STREAM, Claim, Copied, Copy, Drop, Hold, Publish
from kvstore.protocol.errors import InvalidArgument, KVStoreError, ProtocolError, StaleEpoch, Unauthorized, Unavailable
from kvstore.protocol.frames import Header
from kvstore.protocol.master_messages import Cancel, Exists, Grants, Lookup, MatchPrefix, Nodes, NodeTable, Pin, Remove, Reserve
from kvstore.protocol.message import BUSY, GRANTED, TIER_BITS
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, Count, Flags, Hello, Ok, Welcome
from kvstore.protocol.tokens import check_token
from kvstore.rpc.session import Session

MAX_TABLE_BLOB_BYTES: Final = 32 << 20
"""What nodes say of their transfer engines, in one table: the rest of a body's 40 MiB is for the other columns."""

Command = Drop | Hold | Copy

log = logging.getLogger("kvstore.master")


@dataclass(slots=True)
class ClientPeer:
    """The context of a client's session."""

    tenant: str
    reserved: tuple[Sequence[bytes], Sequence[int]] = ((), ())
    """Keys and generations of the last Reserve: whoever hangs up may not have seen its answer."""


@dataclass(frozen=True, slots=True)
class NodePeer:
    """The context of a node's session, under one registration."""

    node_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Reachable:
    """Where this master can be reached: its name, Unix socket with its `rpc.address.socket_id`, and the control plane's host ("": as
    reached) and port."""

    name: str
    host_id: str
    unix: str
    control_host: str
    control_port: int


class FramesService:
    """The transfer Handler of the master."""

    def __init__(
        self,
        directory: Directory,
        committer: Committer,
        *,
        master_epoch: int,
        token_digests: Mapping[str, bytes],
        command_timeout_s: float,
    ) -> None:
        self._directory = directory
        self._committer = committer
        self._master_epoch = master_epoch
        self._token_digests = token_digests
        self._command_timeout_s = command_timeout_s
        self._links: dict[int, Session] = {}
        self.reachable = Reachable("", "", "", "", 0)
        self.counters = dict.fromkeys(
            ("requests", "keys", "lookup_misses", "published", "commands_failed", "copies_ordered", "copies_entered"), 0
        )
        self._handlers: dict[int, Callable[[Session, Header, Any], None]] = {
            Hello.TYPE: self._hello,
            Lookup.TYPE: self._lookup,
            Exists.TYPE: self._exists,
            MatchPrefix.TYPE: self._match_prefix,
            Reserve.TYPE: self._reserve,
            Cancel.TYPE: self._cancel,
            Remove.TYPE: self._remove,
            Pin.TYPE: self._pin,
            Nodes.TYPE: self._nodes,
            Publish.TYPE: self._publish,
            Claim.TYPE: self._claim,
            Copied.TYPE: self._copied,
        }

    def frame(self, session: Session, header: Header, body: memoryview) -> None:
        handler = self._handlers.get(header.type)
        if handler is None:
            raise ProtocolError(f"a master takes no message of type {header.type}")
        self.counters["requests"] += 1
        handler(session, header, MESSAGES[header.type].unpack(body))

    def payload(self, session: Session, header: Header, body: memoryview) -> list[memoryview] | None:
        raise ProtocolError("values go to nodes, not to the master")

    def closed(self, session: Session) -> None:
        """A node whose link breaks is dead until it registers again: it, too, begins anew after a break. What a client reserved last and
        has not used is free for others: it may have been interrupted before it knew of it."""
        peer = session.context
        if isinstance(peer, ClientPeer):
            self._directory.cancel(peer.tenant, *peer.reserved)
        elif isinstance(peer, NodePeer) and self._links.get(peer.node_id) is session:
            del self._links[peer.node_id]
            self._directory.disconnected(peer.node_id, peer.epoch, session.reactor.now_ns())

    def hang_up(self, node_id: int) -> None:
        """The node is forgotten: close its link, should one be left."""
        link = self._links.pop(node_id, None)
        if link is not None:
            link.close("the node is forgotten")

    # --- introductions ---

    def _hello(self, session: Session, header: Header, message: Hello) -> None:
        if message.role == ROLE_NODE:
            node_id = self._meet_node(session, message)
        elif message.role == ROLE_CLIENT:
            node_id = 0
            self.check_token(message.tenant, message.token)
            session.context = ClientPeer(message.tenant)
        else:
            raise InvalidArgument(f"there is no role {message.role}")
        at = self.reachable
        control = f"{at.control_host or session.local_host()}:{at.control_port}"
        session.reply(header.request_id, Welcome(SERVER_MASTER, at.name, node_id, self._master_epoch, at.host_id, at.unix, control))

    def check_token(self, tenant: str, token: str) -> None:
        """Raises Unauthorized, with one text for an unknown tenant and a wrong token."""
        check_token(self._token_digests, tenant, token)

    def _meet_node(self, session: Session, message: Hello) -> int:
        """A node under registration `epoch`; with epoch 0 it only asks for the control plane's address."""
        if not message.epoch:
            return 0
        node = self._directory.members.named(message.name)
        if node is None or node.epoch != message.epoch or not node.is_live:
            raise StaleEpoch(f"node {message.name!r} speaks under registration {message.epoch}, which is over: it must register again")
        session.context = NodePeer(node.node_id, node.epoch)
        former, self._links[node.node_id] = self._links.get(node.node_id), session
        if former is not None and former is not session:
            former.close("the node has registered again")
        return node.node_id

    # --- clients ---

    def _lookup(self, session: Session, header: Header, message: Lookup) -> None:
        self.counters["keys"] += len(message.keys)
        found = self._directory.queries.lookup(_tenant(session), message.keys, avoid=message.avoid)
        self.counters["lookup_misses"] += found.replicas.count(0)
        session.reply(header.request_id, found)

    def _exists(self, session: Session, header: Header, message: Exists) -> None:
        self.counters["keys"] += len(message.keys)
        session.reply(header.request_id, Flags(self._directory.queries.exists(_tenant(session), message.keys)))

    def _match_prefix(self, session: Session, header: Header, message: MatchPrefix) -> None:
        self.counters["keys"] += len(message.keys)
        session.reply(header.request_id, Count(self._directory.queries.match_prefix(_tenant(session), message.keys)))

    def _reserve(self, session: Session, header: Header, message: Reserve) -> None:
        self.counters["keys"] += len(message.keys)
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

    def _cancel(self, session: Session, header: Header, message: Cancel) -> None:
        self._directory.cancel(_tenant(session), message.keys, message.generations)
        session.reply(header.request_id, Ok())

    def _nodes(self, session: Session, header: Header, message: Nodes) -> None:
        _tenant(session)
        live = self._directory.members.live()
        table = NodeTable(
            [node.node_id for node in live],
            [node.info.name for node in live],
            [node.info.host_id for node in live],
            [node.info.unix for node in live],
            [node.info.tcp for node in live],
            [node.revision for node in live],
            _within([node.description.transfer for node in live], MAX_TABLE_BLOB_BYTES),
        )
        session.reply(header.request_id, table)

    def _pin(self, session: Session, header: Header, message: Pin) -> None:
        """Answered when the pins are durable and the nodes have been told."""
        pinning = self._directory.pins.pin(_tenant(session), message.keys, pinned=bool(message.pinned))

        def durable() -> None:
            self._command(pinning.commands, lambda _answers: session.reply(header.request_id, Flags(pinning.flags)))

        self._committer.commit(pinning.ops, durable)

    def _remove(self, session: Session, header: Header, message: Remove) -> None:
        """Answered when every node that holds a block has dropped it, or said that it is in use."""
        tenant = _tenant(session)
        removal = self._directory.removing.plan(tenant, message.keys, force=bool(message.force))

        def told(answers: list[tuple[int, Command, bytes | None]]) -> None:
            unknown: set[bytes] = set()  # a node that did not answer may have them still, even if it is out of reach now
            for node_id, command, flags in answers:
                assert isinstance(command, Drop)
                if flags is None:
                    unknown.update(command.keys)
                else:
                    self._committer.commit(self._directory.removing.dropped(node_id, tenant, command.keys, command.generations, flags))
            left = self._directory.queries.exists(tenant, message.keys)
            gone = [was and not still and key not in unknown for was, still, key in zip(removal.flags, left, message.keys, strict=True)]
            session.reply(header.request_id, Flags(bytes(gone)))

        def durable() -> None:
            if removal.raises_floors:
                self._committer.commit(self._directory.floors_written())
            self._command(removal.commands, told)

        self._committer.commit(removal.ops, durable)

    # --- nodes ---

    def _publish(self, session: Session, header: Header, message: Publish) -> None:
        """Answered when durable. Publishes without operations wait their turn too: an answer says that all before it is durable."""
        peer = session.context
        if not isinstance(peer, NodePeer):
            raise Unauthorized("only a registered node may publish")
        self.counters["published"] += len(message.keys)
        self._take_in(peer.node_id, message, lambda: session.reply(header.request_id, Ok()))

    def _take_in(self, node_id: int, message: Publish, then: Callable[[], None]) -> None:
        """Enter a node's events; `then` when they are durable and visible."""
        plan = self._directory.plan_publish(node_id, message)

        def told(answers: list[tuple[int, Command, bytes | None]]) -> None:
            if all(flags is not None for _node_id, _command, flags in answers):  # else it owes them until it registers again
                self._directory.paid(plan)

        self._command(plan.commands, told)

        def durable() -> None:
            effects = self._directory.apply(plan)
            if effects.ops:
                self._committer.commit(effects.ops)
            self.tell(effects.commands)
            then()

        self._committer.commit(plan.ops, durable)

    def _claim(self, session: Session, header: Header, message: Claim) -> None:
        """Reserve and publish in one: answered when what was granted is durable and visible."""
        peer = session.context
        if not isinstance(peer, NodePeer):
            raise Unauthorized("only a registered node may claim")
        self._directory.members.check(peer.node_id, message.epoch)
        grants = self._directory.reserve(
            message.tenant, message.keys, message.sizes, local_node=peer.node_id, now_ns=session.reactor.now_ns()
        )
        publish = _as_publish(message, grants, peer.node_id)
        self.counters["published"] += len(publish.keys)
        self._take_in(peer.node_id, publish, lambda: session.reply(header.request_id, grants))

    def replicate(self, tenant: str, keys: Sequence[bytes], *, node_id: int, source_node_id: int) -> None:
        """Have node `node_id` fetch those of the blocks that it lacks and the source holds, in the order of `keys`. Fire and forget: what
        comes of it shows in the directory, trouble in the log, once a call. For the loop's thread."""
        if not keys:
            return
        link = self._links.get(node_id)
        try:
            if link is None:
                raise Unavailable(f"node {node_id} has no link to this master")
            orders = self._directory.replication.plan(
                tenant, keys, node_id=node_id, source_node_id=source_node_id, now_ns=link.reactor.now_ns()
            )
        except KVStoreError as error:
            log.warning("nothing is copied from node %d to node %d: %s", source_node_id, node_id, error)
            return
        self.counters["copies_ordered"] += sum(len(order.keys) for order in orders)

        def told(answers: list[tuple[int, Command, bytes | None]]) -> None:
            for _node_id, order, flags in answers:
                assert isinstance(order, Copy)
                self._directory.replication.answered(node_id, order, flags)

        self._order([(node_id, order) for order in orders], told)

    def _copied(self, session: Session, header: Header, message: Copied) -> None:
        """Answered at once: the catalog has these blocks already, and learns of the new holder in its own time."""
        peer = session.context
        if not isinstance(peer, NodePeer):
            raise Unauthorized("only a registered node may report copies")
        entered = self._directory.replication.enter(peer.node_id, message)
        self.counters["copies_entered"] += sum(entered.flags)
        session.reply(header.request_id, Flags(bytes(entered.flags)))
        self._committer.commit(entered.ops)
        self.tell(entered.commands)  # after the flags: only then does the node have the blocks

    def tell(self, commands: Commands) -> None:
        """Send commands whose answers change nothing here: the nodes' own events will."""
        self._command(commands, lambda _answers: None)

    def _command(self, commands: Commands, then: Callable[[list[tuple[int, Command, bytes | None]]], None]) -> None:
        self._order(commands.messages(), then)

    def _order(self, messages: Sequence[tuple[int, Command]], then: Callable[[list[tuple[int, Command, bytes | None]]], None]) -> None:
        """Send commands and call `then` with (node id, command, flags or None for no answer) when all have been answered."""
        answers: list[tuple[int, Command, bytes | None]] = []
        if not messages:
            then(answers)
            return

        def answered(node_id: int, message: Command, flags: bytes | None) -> None:
            answers.append((node_id, message, flags))
            if len(answers) == len(messages):
                then(answers)

        for node_id, message in messages:
            link = self._links.get(node_id)
            if link is None:
                answered(node_id, message, None)
            else:
                link.request(message, self._on_answer(node_id, message, answered), deadline_s=self._command_timeout_s)

    def _on_answer(
        self, node_id: int, message: Command, answered: Callable[[int, Command, bytes | None], None]
    ) -> Callable[[Header | None, memoryview | KVStoreError], None]:
        def on_reply(header: Header | None, body: memoryview | KVStoreError) -> None:
            flags = None
            try:
                flags = _flags_of(header, body, len(message.keys))
            except KVStoreError as error:
                self.counters["commands_failed"] += 1
                log.warning("node %d did not carry out a command: %s", node_id, error)
            answered(node_id, message, flags)

        return on_reply


def _within(blobs: Sequence[bytes], max_bytes: int) -> list[bytes]:
    """The blobs, empty from the first on with which they are more than a message takes: such nodes are reached at their TCP address."""
    total_bytes = itertools.accumulate(map(len, blobs))
    return [blob if total <= max_bytes else b"" for blob, total in zip(blobs, total_bytes, strict=True)]


def _as_publish(claim: Claim, grants: Grants, node_id: int) -> Publish:
    """The commits of what was granted at the claiming node itself; what would have to go to another node becomes BUSY in `grants`."""
    statuses = bytearray(grants.statuses)
    granted = [at for at, status in enumerate(statuses) if status == GRANTED]
    for at in granted:
        if grants.nodes[at] != node_id:
            statuses[at] = BUSY
    grants.statuses = bytes(statuses)
    granted = [at for at in granted if statuses[at] == GRANTED]
    count = len(granted)
    return Publish(
        epoch=claim.epoch,
        phase=PHASE_STREAM,
        tenants=[claim.tenant],
        namespaces=[claim.namespace],
        keys=[claim.keys[at] for at in granted],
        kinds=bytes((EVENT_COMMIT,)) * count,
        tenant_indexes=[0] * count,
        namespace_indexes=[0] * count,
        sizes=[claim.sizes[at] for at in granted],
        checksums=[claim.checksums[at] for at in granted],
        generations=[grants.generations[at] for at in granted],
        tiers=bytes((TIER_BITS["dram"],)) * count,
        parents=[claim.parents[at] for at in granted],
    )


def _flags_of(header: Header | None, body: memoryview | KVStoreError, count: int) -> bytes:
    """What a node answered to a command on `count` blocks. Raises its error, or ProtocolError for another answer."""
    if isinstance(body, KVStoreError):
        raise body
    flags = Flags.unpack(body).flags
    if header is None or header.type != Flags.TYPE or len(flags) != count:
        raise ProtocolError(f"the answer is not {count} flags")
    return flags


def _client(session: Session) -> ClientPeer:
    peer = session.context
    if not isinstance(peer, ClientPeer):
        raise Unauthorized("say Hello as a client first")
    return peer


def _tenant(session: Session) -> str:
    return _client(session).tenant
