"""A cluster that exists only as answers to effects: one master, nodes with real memfd slabs, and a script of things that go wrong."""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import xxhash

from kvstore.client.config import ClientSettings
from kvstore.client.connections.resources import ClientResources
from kvstore.client.core import effects
from kvstore.client.core.effects import Operation
from kvstore.protocol.errors import Draining, InvalidTicket, KVStoreError, Unavailable, Unreachable
from kvstore.protocol.master_messages import (
    CancelReservations,
    Exists,
    Locations,
    Lookup,
    MatchPrefix,
    Nodes,
    NodeTable,
    Pin,
    Remove,
    Reserve,
    ReserveReply,
)
from kvstore.protocol.message import BUSY, GRANTED, PRESENT, Message
from kvstore.protocol.node_messages import (
    HOLD_GRANTED,
    HOLD_MISS,
    INLINE,
    MAPPED,
    MISS,
    CommitPuts,
    ExportSlabs,
    ExportSlabsReply,
    HoldBlocks,
    MapSlabsReply,
    OpenSlots,
    OpenSlotsReply,
    Put,
    ReadBlocks,
    ReadBlocksReply,
    ReleaseLeases,
    WaitCommitted,
)
from kvstore.protocol.session_messages import Count, Flags, Hello, Ok, Welcome
from kvstore.rpc.address import Address, parse_address
from kvstore.rpc.client.connection_pool import ConnectionLease
from kvstore.rpc.deadline import Deadline
from tests.client.oracle_engine import CLIENT_TRANSFER, OracleEngines, describe

HERE = "this host"


def is_here(unix: str, host_id: str) -> bool:
    return host_id == HERE


MASTER = "master:1"
SLAB_BYTES = 1 << 20
BIG, OTHER = b"B" * 100_000, b"C" * 100_000
"""Values that go into a slab, or by the engine; smaller ones along with the message."""


class OracleChannel:
    """A channel to one of the oracle's daemons."""

    def __init__(self, address: Address, welcome: Welcome, *, makes_hot_copies: bool = False) -> None:
        self.makes_hot_copies = makes_hot_copies
        self.address = address
        self.welcome = welcome
        self.is_open = self.is_settled = True
        self.payload = b""
        self.sent: Message | None = None
        """A question whose answer is awaited."""

    def is_closed_by_peer(self) -> bool:
        return not self.is_open

    def close(self) -> None:
        self.is_open = False


@dataclass
class OracleNode:
    """A node on this host has a Unix socket and slabs; one elsewhere has neither, but perhaps a transfer engine. `rail` names what its
    engine listens on; another `epoch` is another process."""

    node_id: int
    local: bool
    epoch: int = 1
    tier: int = 2
    port: int = 1
    blocks: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    puts: dict[int, tuple[bytes, int, int, int]] = field(default_factory=dict)
    ahead: Sequence[int] = ()
    has_engine: bool = False
    rail: str = "eth0"
    revision: int = 0

    def __post_init__(self) -> None:
        self.fds = {slab: os.memfd_create(f"slab{slab}") for slab in (1, 2)}
        for fd in self.fds.values():
            os.truncate(fd, SLAB_BYTES)
        self.offset = 0

    @property
    def tcp(self) -> str:
        return f"node{self.node_id}:{self.port}"

    @property
    def unix(self) -> str:
        return f"/run/node{self.node_id}" if self.local else ""

    @property
    def transfer(self) -> bytes:
        return describe(self) if self.has_engine else b""

    def place(self, size: int) -> int:
        at, self.offset = self.offset, self.offset + size
        return at

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


Scripted = Message | BaseException | Callable[..., Any]
"""A function is given the channel and the message, and gives the answer; for a Move see `_move`."""


class Oracle:
    """Drives operations. `script[MessageType]` holds what happens instead at the next such messages; `log` has all of them."""

    def __init__(self, *nodes: OracleNode, spread: int = 0, **settings: Any) -> None:
        self.nodes = {node.node_id: node for node in nodes}
        self.unreachable: set[str] = set()
        self.partitions = 1
        """Number reported by the masters."""
        self.owners: dict[str, str] = {}
        """Owner of the catalog that each standby master names, by address."""
        self.hanging: set[str] = set()
        """Addresses of unresponsive masters."""
        self.awaited: list[float] = []
        """Seconds that each reply of a hanging master was awaited."""
        self.on_await: Callable[[int], object] = lambda waited: None
        """Called with the number of waits after each."""
        self.refusals: dict[str, KVStoreError] = {}
        """Error in place of a connection, by address."""
        self.impostors: dict[str, str] = {}
        """Names of other daemons that took an address or path over."""
        self.makes_hot_copies = False
        """The master makes hot copies."""
        self.script: dict[type, deque[Scripted]] = defaultdict(deque)
        self.log: list[Message] = []
        self.loans: list[ConnectionLease[OracleChannel]] = []
        self.slept_s = 0.0
        self.replicas: dict[bytes, list[int]] = {}
        self.reserved: set[bytes] = set()
        self.generation = 0
        self.lease = 0
        self.lease_until_ns = 1 << 62
        self.ticket = b""
        """Ticket that nodes accept, if set; the master issues `issued`, valid for `ticket_ms`."""
        self.issued = b""
        self.ticket_ms = 0
        self.hellos: list[Hello | None] = []
        """Hello of each opened connection."""
        self.aside: list[Operation[None]] = []
        self.idle: dict[Address, list[OracleChannel]] = defaultdict(list)
        self.engines = OracleEngines()
        self.moves: list[effects.TransferEffect] = []
        self.together: list[int] = []
        """Number of operations of each GatherEffect."""
        self.resources = ClientResources(ClientSettings(master=MASTER, **settings), CLIENT_TRANSFER, is_here=is_here, spread=spread)

    def deadline(self) -> Deadline:
        return Deadline(5.0)

    def sent(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.log if isinstance(message, kind)]

    def store(self, key: bytes, value: bytes, *node_ids: int) -> None:
        """A block that is there from the start."""
        self.generation += 1
        for node_id in node_ids:
            self.nodes[node_id].blocks[key] = (value, self.generation)
        self.replicas[key] = list(node_ids)

    def run(self, operation: Operation[Any]) -> Any:
        return effects.drive(operation, self._do)

    def all_given_back(self) -> bool:
        return all(connection._release is None for connection in self.loans)

    def _do(self, effect: Any) -> Any:
        match effect:
            case effects.AcquireConnectionEffect():
                return self._take(effect.address, effect.hello)
            case effects.RequestEffect():
                return self._ask(cast(OracleChannel, effect.channel), effect.message, [bytes(part) for part in effect.payload])
            case effects.SendEffect():
                cast(OracleChannel, effect.channel).sent = effect.message
            case effects.ReceiveEffect():
                return self._await(cast(OracleChannel, effect.channel), effect)
            case effects.RequestFdsEffect():
                return self._fds(cast(OracleChannel, effect.channel), effect.message)
            case effects.ReadPayloadEffect():
                return self._fill(cast(OracleChannel, effect.channel), effect.destinations)
            case effects.SendOneWayEffect():
                self.log.append(effect.message)
            case effects.RunInThreadEffect():
                return effect.function()
            case effects.TransferEffect():
                return self._move(effect)
            case effects.SpawnEffect():
                self._begin_thread(effect)
            case effects.SleepEffect():
                self.slept_s += effect.seconds
            case effects.GatherEffect():
                self.together.append(len(effect.operations))
                return [self.run(operation) for operation in effect.operations]
        return None

    def _begin_thread(self, effect: effects.SpawnEffect) -> None:
        """It is left to the test. Scripted are errors."""
        scripted: Any = self.script[type(effect)].popleft() if self.script[type(effect)] else None
        if scripted is not None:
            raise scripted
        self.aside.append(effect.operation)

    def _move(self, move: effects.TransferEffect) -> None:
        """Scripted are errors, and functions of the move that are called once its bytes have arrived."""
        assert move.engine is self.resources.engine_copies.remote.engine
        self.moves.append(move)
        scripted: Any = self.script[effects.TransferEffect].popleft() if self.script[effects.TransferEffect] else None
        if isinstance(scripted, BaseException):
            raise scripted
        self.engines.carry_out(move, self.nodes)
        if scripted is not None:
            scripted(move)

    def _take(self, address: Address, hello: Hello | None) -> ConnectionLease[OracleChannel]:
        idle = self.idle[address]
        reused = bool(idle)
        if idle:
            channel = idle.pop()
        else:
            if str(address) in self.unreachable:
                raise Unavailable(f"cannot connect to {address}")
            if str(address) in self.refusals:
                raise self.refusals[str(address)]
            self.hellos.append(hello)
            if self.ticket and self.node_at(address) is not None and (hello is None or hello.ticket != self.ticket):
                raise InvalidTicket("this ticket has ended")
            welcome = self._welcome(address)
            welcome = replace(welcome, name=self.impostors.get(address.unix or str(address), welcome.name))
            channel = OracleChannel(address, welcome, makes_hot_copies=self.makes_hot_copies)
        connection = ConnectionLease(channel, lambda channel: None, reused=reused)
        self.loans.append(connection)
        return connection

    def node_at(self, address: Address) -> OracleNode | None:
        return next((node for node in self.nodes.values() if address in (parse_address(node.tcp), Address(unix=node.unix))), None)

    def _welcome(self, address: Address) -> Welcome:
        node = self.node_at(address)
        if node is None:
            return Welcome(1, "master", epoch=7, owner=self.owners.get(str(address), ""), partitions=self.partitions)
        return Welcome(2, f"n{node.node_id}", node.node_id, node.epoch, HERE if node.local else "there", node.unix)

    def _await(self, channel: OracleChannel, effect: effects.ReceiveEffect) -> Message | None:
        message = channel.sent
        assert message is not None
        channel.is_settled = str(channel.address) not in self.hanging
        if not channel.is_settled:
            self.awaited.append(effect.until.timeout_s)
            self.on_await(len(self.awaited))
            return None
        return self._ask(channel, message, [])

    def _ask(self, channel: OracleChannel, message: Any, payload: list[bytes]) -> Message:
        assert channel.is_open
        self.log.append(message)
        scripted = self.script[type(message)]
        if scripted:
            answer = scripted.popleft()
            if isinstance(answer, BaseException):
                if not isinstance(answer, KVStoreError) or (isinstance(answer, Unavailable) and not isinstance(answer, Draining)):
                    channel.close()
                raise answer
            return answer(channel, message) if callable(answer) else answer
        return self.answer(channel, message, payload)

    def answer(self, channel: OracleChannel, message: Any, payload: Sequence[bytes] = ()) -> Message:
        """Reply of a healthy cluster."""
        node = self.node_at(channel.address)
        match message:
            case Nodes():
                nodes = self.nodes.values()
                hosts = [HERE if node.local else "there" for node in nodes]
                names = [f"n{node.node_id}" for node in nodes]
                unix, tcp = [node.unix for node in nodes], [node.tcp for node in nodes]
                revisions, transfers = [node.revision for node in nodes], [node.transfer for node in nodes]
                tickets = [self.issued] * len(names)
                return NodeTable(list(self.nodes), names, hosts, unix, tcp, revisions, transfers, tickets, self.ticket_ms)
            case Lookup():
                return self._lookup(message)
            case Exists() | Pin():
                return Flags(bytes(key in self.replicas for key in message.keys))
            case MatchPrefix():
                return Count(next((i for i, key in enumerate(message.keys) if key not in self.replicas), len(message.keys)))
            case Remove():
                return Flags(bytes(self.replicas.pop(key, None) is not None for key in message.keys))
            case Reserve():
                return self._reserve(message)
            case CancelReservations():
                self.reserved -= set(message.keys)
                return Ok()
        assert node is not None
        match message:
            case Put():
                for key, generation, value, total in zip(message.keys, message.generations, payload, message.checksums, strict=True):
                    assert xxhash.xxh3_64_intdigest(value) == total
                    self._publish(node, key, value, generation)
                return Flags(b"\x01" * len(message.keys))
            case WaitCommitted():
                return Flags(b"")
            case HoldBlocks():
                return Flags(bytes(HOLD_GRANTED if key in node.blocks else HOLD_MISS for key in message.keys))
            case OpenSlots():
                return self._open(node, message)
            case CommitPuts():
                return self._commit(node, message)
            case ReadBlocks():
                return self._read(channel, node, message)
            case ExportSlabs():
                there = [slab in node.fds for slab in message.slabs]
                shown = zip(message.slabs, there, strict=True)
                return ExportSlabsReply([self.engines.show_slab(node, slab, SLAB_BYTES) if is_there else b"" for slab, is_there in shown])
        raise AssertionError(message)

    def _lookup(self, message: Lookup) -> Locations:
        found = [[n for n in self.replicas.get(key, []) if n != message.avoid] for key in message.keys]
        values = [self._value(key) for key in message.keys]
        nodes = [n for ids in found for n in ids]
        return Locations(
            bytes(map(len, found)),
            [len(value) for value, _ in values],
            [xxhash.xxh3_64_intdigest(value) for value, _ in values],
            [generation for _, generation in values],
            nodes,
            bytes(self.nodes[n].tier if n in self.nodes else 2 for n in nodes),
        )

    def _value(self, key: bytes) -> tuple[bytes, int]:
        return next((node.blocks[key] for node in self.nodes.values() if key in node.blocks), (b"", 0))

    def _reserve(self, message: Reserve) -> ReserveReply:
        statuses, nodes, generations = bytearray(), [], []
        free = [n for n in self.nodes if n != message.avoid]
        for key in message.keys:
            status = PRESENT if key in self.replicas else BUSY if key in self.reserved else GRANTED
            self.generation += 1
            statuses.append(status)
            granted = status == GRANTED
            nodes.append((message.local_node if message.local_node in free else free[0]) if granted else 0)
            generations.append(self.generation if granted else 0)
            if granted:
                self.reserved.add(key)
        return ReserveReply(bytes(statuses), nodes, generations)

    def _publish(self, node: OracleNode, key: bytes, value: bytes, generation: int) -> None:
        self.reserved.discard(key)
        node.blocks[key] = (value, generation)
        self.replicas[key] = [node.node_id]

    def _open(self, node: OracleNode, message: OpenSlots) -> OpenSlotsReply:
        offsets, ids, regions = [], [], []
        for key, size, generation in zip(message.keys, message.sizes, message.generations, strict=True):
            offsets.append(node.place(size))
            ids.append(len(node.puts) + 1)
            node.puts[ids[-1]] = (key, offsets[-1], size, generation)
            regions.append(self.engines.show_slot(node, ids[-1], offsets[-1], size) if message.engine else b"")
        return OpenSlotsReply(bytes([GRANTED] * len(ids)), ids, [1] * len(ids), offsets, regions, list(node.ahead))

    def _commit(self, node: OracleNode, message: CommitPuts) -> Flags:
        for put_id, total in zip(message.put_ids, message.checksums, strict=True):
            key, offset, size, generation = node.puts.pop(put_id)
            value = os.pread(node.fds[1], size, offset)
            assert xxhash.xxh3_64_intdigest(value) == total
            self._publish(node, key, value, generation)
        return Flags(b"\x01" * len(message.put_ids))

    def _read(self, channel: OracleChannel, node: OracleNode, message: ReadBlocks) -> ReadBlocksReply:
        statuses, sizes, sums, offsets, payload = bytearray(), [], [], [], []
        for key, generation in zip(message.keys, message.generations, strict=True):
            value, held = node.blocks.get(key, (b"", 0))
            offset = 0
            if key not in node.blocks or (generation and generation != held):
                statuses.append(MISS)
            elif (channel.address.unix or (message.engine and node.has_engine)) and len(value) > message.inline_bytes:
                statuses.append(MAPPED)
                offset = node.place(len(value))
                os.pwrite(node.fds[1], value, offset)
            else:
                statuses.append(INLINE)
                payload.append(value)
            offsets.append(offset)
            sizes.append(len(value))
            sums.append(xxhash.xxh3_64_intdigest(value))
        channel.payload = b"".join(payload)
        if MAPPED in statuses:
            self.lease += 1
        count = len(statuses)
        lease = self.lease if MAPPED in statuses else 0
        return ReadBlocksReply(
            lease, self.lease_until_ns, 10_000, bytes(statuses), sizes, sums, bytes([node.tier] * count), [1] * count, offsets
        )

    def _fds(self, channel: OracleChannel, message: Any) -> tuple[MapSlabsReply, list[int]]:
        self.log.append(message)
        if self.script[type(message)]:
            scripted: Any = self.script[type(message)].popleft()
            if callable(scripted):
                scripted = scripted(channel, message)
            channel.is_open = not isinstance(scripted, Unreachable)
            raise scripted
        node = self.node_at(channel.address)
        assert node is not None
        there = [slab in node.fds for slab in message.slabs]
        gone = [slab for slab in message.mapped if slab not in node.fds]
        sizes = [SLAB_BYTES * found for found in there]
        return MapSlabsReply(sizes, gone), [os.dup(node.fds[slab]) for slab in message.slabs if slab in node.fds]

    def _fill(self, channel: OracleChannel, destinations: Sequence[memoryview]) -> None:
        assert channel.is_open
        for view in destinations:
            view[:], channel.payload = channel.payload[: len(view)], channel.payload[len(view) :]

    def releases(self) -> list[int]:
        return [lease for message in self.sent(ReleaseLeases) for lease in message.leases]


Pair = tuple[OracleNode, OracleNode]
"""One on this host, one on another."""
MakeOracle = Callable[..., Oracle]
