"""Fetch of blocks from another node: one connection, values received into given memory, each verified. Blocking and
stateless; runs in a thread of replica_queue.py.

Large batches use the transfer engine, so that the source's loop only grants the lease; on failure they come by message.
`SourceRates` keeps the measured rates for the master.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import (
    ChecksumMismatch,
    Denied,
    Fenced,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    StaleHandle,
    Unavailable,
)
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.message import MAX_RATES
from kvstore.protocol.node_messages import (
    DEFERRED,
    INLINE,
    MAPPED,
    MISS,
    ExportSlabs,
    ExportSlabsReply,
    ReadBlocks,
    ReadBlocksReply,
    ReleaseLeases,
)
from kvstore.protocol.session_messages import SERVER_NODE, Hello
from kvstore.rpc.address import Address, is_local_socket, parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates
from kvstore.tiers.value_codec import is_raw_tensor
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.batch import Copy, Span
from kvstore.transfer.paths.path_chooser import MeasuredRate
from kvstore.transfer.paths.peer import PeerRegion
from kvstore.transfer.paths.transfers import Priority

ENGINE_MIN_BYTES: Final = 1 << 20
"""Batches of at least this size use the transfer engine; the clients' default."""

MAX_REGIONS: Final = 64
"""Regions requested per message."""

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class SourceNode:
    """Source of a copy, as the master describes it. `unix` ("" for none) is usable if its socket has the id `host_id`."""

    node_id: int
    host_id: str
    unix: str
    tcp: str
    transfer: bytes = b""
    """Description of its transfer engine; b"" for none."""


class ReplicaBlock(NamedTuple):
    """Block to fetch: key, generation, checksum of the value that was put, and memory of its size, owned by the caller."""

    key: bytes
    generation: int
    checksum: int
    destination: memoryview


def fetch(
    source: SourceNode,
    hello: Hello,
    requested: Sequence[ReplicaBlock],
    deadline: Deadline,
    engine: TransferEngine | None = None,
    tls: Certificates | None = None,
    note_hints: Callable[[Sequence[ReplicaBlock], bytes], object] | None = None,
) -> list[int | KVStoreError]:
    """Fetch blocks; return for each the xxh3_64 of its bytes, or the error. Memory of a failed block is undefined.

    The digest differs from the expected one only for a raw tensor value that the source decoded from a lossy copy.
    `engine` is this node's. `note_hints` gets the blocks of each answer, and the retention hints that they have at the source.

    Raises Unavailable, DeadlineExceeded, ProtocolError, or the source's refusal (Unauthorized, StaleEpoch): nothing was
    fetched.
    """
    channel = _open(source, hello, deadline, tls)
    replies = [(DEFERRED, 0)] * len(requested)
    """Status and checksum of each block, as sent by the source."""
    is_worth_it = sum(len(one.destination) for one in requested) >= ENGINE_MIN_BYTES
    by_engine = engine if is_worth_it and source.transfer and not channel.address.unix else None
    try:
        while left := [index for index, (status, _) in enumerate(replies) if status == DEFERRED]:
            part = [requested[index] for index in left]
            blocks = _read(channel, source, part, deadline, by_engine=by_engine is not None)
            statuses = bytes(blocks.statuses)
            if blocks.hints and note_hints is not None:
                note_hints(part, blocks.hints)
            if blocks.lease and by_engine is not None:
                try:
                    _move(channel, source, blocks, part, deadline, by_engine)
                except (Unavailable, StaleHandle, Fenced, Denied, InvalidArgument, ProtocolError) as error:
                    if not channel.is_open:  # the source itself is unreachable
                        raise
                    log.warning("transfer from node %d failed, fetching by message: %s", source.node_id, error)
                    by_engine, statuses = None, statuses.replace(bytes([MAPPED]), bytes([DEFERRED]))
                channel.post(ReleaseLeases([blocks.lease]))
            for index, status, served in zip(left, statuses, blocks.checksums, strict=True):
                replies[index] = status, served
    finally:
        channel.close()
    return [_verdict(source, one, status, served) for one, (status, served) in zip(requested, replies, strict=True)]


def _read(
    channel: Channel, source: SourceNode, requested: Sequence[ReplicaBlock], deadline: Deadline, *, by_engine: bool
) -> ReadBlocksReply:
    """Send one ReadBlocks and receive the values of its reply."""
    keys, generations = [one.key for one in requested], [one.generation for one in requested]
    if by_engine:
        message = ReadBlocks(keys, generations, 0, int(deadline.left_s() * 1000) + 1, 1)
    else:
        message = ReadBlocks(keys, generations, MAX_VALUE_BYTES, 0)
    blocks = channel.call(message, ReadBlocksReply, deadline)
    _check(source, blocks, requested, by_engine=by_engine)
    channel.read_into([one.destination for one, status in zip(requested, blocks.statuses, strict=True) if status == INLINE], deadline)
    return blocks


def _move(
    channel: Channel,
    source: SourceNode,
    blocks: ReadBlocksReply,
    requested: Sequence[ReplicaBlock],
    deadline: Deadline,
    engine: TransferEngine,
) -> None:
    """Transfer the values of the reply by the engine. Raises as TransferEngine.connect, import_region and transfer, and
    StaleHandle for a freed slab."""
    indexes = [index for index, status in enumerate(blocks.statuses) if status == MAPPED]
    slabs = list(dict.fromkeys(blocks.slabs[index] for index in indexes))
    peer, regions = engine.connect(source.transfer), dict[int, PeerRegion]()
    for start in range(0, len(slabs), MAX_REGIONS):
        part = slabs[start : start + MAX_REGIONS]
        shown = channel.call(ExportSlabs(part), ExportSlabsReply, deadline).regions
        if len(shown) != len(part) or not all(shown):
            raise StaleHandle(f"node {source.node_id} reported a slab that it no longer has")
        regions.update((slab, engine.import_region(peer, region)) for slab, region in zip(part, shown, strict=True))
    copies: list[Copy] = [
        (Span(regions[blocks.slabs[index]], blocks.offsets[index]), requested[index].destination, blocks.sizes[index]) for index in indexes
    ]
    engine.transfer(copies, deadline_s=deadline.left_s(), priority=Priority.BACKGROUND)


def _open(source: SourceNode, hello: Hello, deadline: Deadline, tls: Certificates | None) -> Channel:
    if is_local_socket(source.unix, source.host_id):
        try:
            return _open_at(Address(unix=source.unix), source, hello, deadline, None)
        except Unavailable:  # fall back to TCP
            pass
    return _open_at(parse_address(source.tcp), source, hello, deadline, tls)


def _open_at(address: Address, source: SourceNode, hello: Hello, deadline: Deadline, tls: Certificates | None) -> Channel:
    """Open a connection. Raises Unavailable also if another node answers; node ids are unique under one master."""
    channel = Channel.open(address, hello, deadline, tls=tls)
    if (channel.welcome.server, channel.welcome.node_id) != (SERVER_NODE, source.node_id):
        channel.close()
        raise Unavailable(f"{address} is {channel.welcome.name!r}, not node {source.node_id}")
    return channel


def _check(source: SourceNode, blocks: ReadBlocksReply, requested: Sequence[ReplicaBlock], *, by_engine: bool) -> None:
    """Raises ProtocolError unless the values have the requested sizes, because they are received into that memory."""
    expected = {INLINE, MISS, DEFERRED, MAPPED} if by_engine else {INLINE, MISS, DEFERRED}
    if len(blocks.statuses) != len(requested) or not set(blocks.statuses) <= expected:
        raise ProtocolError(f"node {source.node_id} did not answer for the {len(requested)} requested blocks")
    for one, status, size_bytes in zip(requested, blocks.statuses, blocks.sizes, strict=True):
        if status in (INLINE, MAPPED) and size_bytes != len(one.destination):
            raise ProtocolError(f"node {source.node_id} has {size_bytes} bytes for a block of {len(one.destination)} bytes")


def _verdict(source: SourceNode, one: ReplicaBlock, status: int, served: int) -> int | KVStoreError:
    """Verify the bytes. `served` is the source's checksum; it is accepted instead of the expected one only for a raw
    tensor value, which a codec may have changed."""
    if status == MISS:
        return StaleHandle(f"node {source.node_id} no longer has the block in this generation")
    found = xxhash.xxh3_64_intdigest(one.destination)
    if found != one.checksum and not (found == served and is_raw_tensor(one.destination)):
        return ChecksumMismatch(f"node {source.node_id} sent a value that does not match the recorded xxh3_64")
    return found


class SourceRates:
    """Newest measured rate of each of the last MAX_RATES sources. Not thread-safe: called from the node's loop."""

    def __init__(self) -> None:
        self._rates: dict[int, MeasuredRate] = {}

    def note(self, node_id: int, measured: MeasuredRate | None) -> None:
        """Record a measurement, if there is one."""
        if measured is None:
            return
        self._rates.pop(node_id, None)
        self._rates[node_id] = measured
        if len(self._rates) > MAX_RATES:
            del self._rates[next(iter(self._rates))]

    def report(self, now_ns: int) -> list[pb.PeerRate]:
        """Return the rates for a heartbeat. The master decides how old a rate may be."""
        return [
            pb.PeerRate(
                node_id=node_id,
                bytes_per_s=measured.bytes_s,
                basis_bytes=measured.basis_bytes,
                age_s=max(0, now_ns - measured.measured_ns) / 1e9,
            )
            for node_id, measured in self._rates.items()
        ]
