"""Blocks fetched from another node: one connection, one Read, values straight into the memory given, each checked. Blocking and without
state, for a thread of its own: what is fetched, and what becomes of it, is store/replication/replica_queue.py.

Many bytes come by the transfer engine, past the loop of the source, which only grants the lease; by messages where that fails. The rates
that the engine measured are kept for the master.
"""

import logging
from collections.abc import Sequence
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
"""Batches from this size on go by the transfer engine, as clients' do by default."""

MAX_REGIONS: Final = 64
"""Asked for in one message."""

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A node as the master tells of it: `unix` ("" for none) works where it is the socket that `host_id` tells of."""

    node_id: int
    host_id: str
    unix: str
    tcp: str
    transfer: bytes = b""
    """How its transfer engine is reached; b"" for none."""


class ReplicaBlock(NamedTuple):
    """A block of one generation, its checksum as it was put, and `size_bytes` of memory for it, which stays the caller's."""

    key: bytes
    generation: int
    checksum: int
    destination: memoryview


def fetch(
    source: SourceNode,
    hello: Hello,
    wanted: Sequence[ReplicaBlock],
    deadline: Deadline,
    engine: TransferEngine | None = None,
    tls: Certificates | None = None,
) -> list[int | KVStoreError]:
    """For each block the xxh3_64 of the bytes that are in the destination now, or why they are not; its content is undefined then.

    It is the checksum wanted, but for a raw tensor value of which the source has only what came back from an encoded copy. `engine` is this
    node's.

    Raises Unavailable, DeadlineExceeded, ProtocolError, or the source's refusal (Unauthorized, StaleEpoch): nothing has been fetched.
    """
    channel = _open(source, hello, deadline, tls)
    said = [(DEFERRED, 0)] * len(wanted)
    """By the source of each: its status, and the checksum of what it sent."""
    is_worth_it = sum(len(one.destination) for one in wanted) >= ENGINE_MIN_BYTES
    by_engine = engine if is_worth_it and source.transfer and not channel.address.unix else None
    try:
        while left := [index for index, (status, _) in enumerate(said) if status == DEFERRED]:
            part = [wanted[index] for index in left]
            blocks = _ask(channel, source, part, deadline, by_engine=by_engine is not None)
            statuses = bytes(blocks.statuses)
            if blocks.lease and by_engine is not None:
                try:
                    _move(channel, source, blocks, part, deadline, by_engine)
                except (Unavailable, StaleHandle, Fenced, Denied, InvalidArgument, ProtocolError) as error:
                    if not channel.is_open:  # it is the source that is gone, not only the way to its engine
                        raise
                    log.warning("blocks of node %d come by message: %s", source.node_id, error)
                    by_engine, statuses = None, statuses.replace(bytes([MAPPED]), bytes([DEFERRED]))
                channel.post(ReleaseLeases([blocks.lease]))
            for index, status, served in zip(left, statuses, blocks.checksums, strict=True):
                said[index] = status, served
    finally:
        channel.close()
    return [_verdict(source, one, status, served) for one, (status, served) in zip(wanted, said, strict=True)]


def _ask(channel: Channel, source: SourceNode, wanted: Sequence[ReplicaBlock], deadline: Deadline, *, by_engine: bool) -> ReadBlocksReply:
    """One Read, and the values that come with its answer."""
    keys, generations = [one.key for one in wanted], [one.generation for one in wanted]
    if by_engine:
        message = ReadBlocks(keys, generations, 0, int(deadline.left_s() * 1000) + 1, 1)
    else:
        message = ReadBlocks(keys, generations, MAX_VALUE_BYTES, 0)
    blocks = channel.call(message, ReadBlocksReply, deadline)
    _check(source, blocks, wanted, by_engine=by_engine)
    channel.read_into([one.destination for one, status in zip(wanted, blocks.statuses, strict=True) if status == INLINE], deadline)
    return blocks


def _move(
    channel: Channel,
    source: SourceNode,
    blocks: ReadBlocksReply,
    wanted: Sequence[ReplicaBlock],
    deadline: Deadline,
    engine: TransferEngine,
) -> None:
    """Have the engine read what the answer points at. Raises as TransferEngine.connect, import_region and transfer do, StaleHandle for a
    slab that is gone."""
    places = [place for place, status in enumerate(blocks.statuses) if status == MAPPED]
    slabs = list(dict.fromkeys(blocks.slabs[place] for place in places))
    peer, regions = engine.connect(source.transfer), dict[int, PeerRegion]()
    for start in range(0, len(slabs), MAX_REGIONS):
        part = slabs[start : start + MAX_REGIONS]
        shown = channel.call(ExportSlabs(part), ExportSlabsReply, deadline).regions
        if len(shown) != len(part) or not all(shown):
            raise StaleHandle(f"node {source.node_id} named a slab that it does not have")
        regions.update((slab, engine.import_region(peer, region)) for slab, region in zip(part, shown, strict=True))
    copies: list[Copy] = [
        (Span(regions[blocks.slabs[place]], blocks.offsets[place]), wanted[place].destination, blocks.sizes[place]) for place in places
    ]
    engine.transfer(copies, deadline_s=deadline.left_s(), priority=Priority.BACKGROUND)


def _open(source: SourceNode, hello: Hello, deadline: Deadline, tls: Certificates | None) -> Channel:
    if is_local_socket(source.unix, source.host_id):
        try:
            return _open_at(Address(unix=source.unix), source, hello, deadline, None)
        except Unavailable:  # gone since: TCP does as well
            pass
    return _open_at(parse_address(source.tcp), source, hello, deadline, tls)


def _open_at(address: Address, source: SourceNode, hello: Hello, deadline: Deadline, tls: Certificates | None) -> Channel:
    """Raises Unavailable too when it is not the source that answers: its node id is unique under the master that both obey."""
    channel = Channel.open(address, hello, deadline, tls=tls)
    if (channel.welcome.server, channel.welcome.node_id) != (SERVER_NODE, source.node_id):
        channel.close()
        raise Unavailable(f"at {address} there is {channel.welcome.name!r}, not node {source.node_id}")
    return channel


def _check(source: SourceNode, blocks: ReadBlocksReply, wanted: Sequence[ReplicaBlock], *, by_engine: bool) -> None:
    """Raises ProtocolError unless the values that follow are those asked for: their bytes go where a value of another size has no room."""
    expected = {INLINE, MISS, DEFERRED, MAPPED} if by_engine else {INLINE, MISS, DEFERRED}
    if len(blocks.statuses) != len(wanted) or not set(blocks.statuses) <= expected:
        raise ProtocolError(f"node {source.node_id} did not send the {len(wanted)} blocks that it was asked for")
    for one, status, size_bytes in zip(wanted, blocks.statuses, blocks.sizes, strict=True):
        if status in (INLINE, MAPPED) and size_bytes != len(one.destination):
            raise ProtocolError(f"node {source.node_id} has {size_bytes} bytes for a block of {len(one.destination)}")


def _verdict(source: SourceNode, one: ReplicaBlock, status: int, served: int) -> int | KVStoreError:
    """`served` is what the source says of the bytes: it counts against the checksum wanted only where a codec may have changed them."""
    if status == MISS:
        return StaleHandle(f"node {source.node_id} does not have the block in this generation any more")
    found = xxhash.xxh3_64_intdigest(one.destination)
    if found != one.checksum and not (found == served and is_raw_tensor(one.destination)):
        return ChecksumMismatch(f"node {source.node_id} sent a value whose xxh3_64 is not the one recorded")
    return found


class SourceRates:
    """The newest measurement of each of the MAX_RATES sources measured last. Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self._rates: dict[int, MeasuredRate] = {}

    def note(self, node_id: int, measured: MeasuredRate | None) -> None:
        """Blocks of that node have come; None: nothing was measured by that."""
        if measured is None:
            return
        self._rates.pop(node_id, None)
        self._rates[node_id] = measured
        if len(self._rates) > MAX_RATES:
            del self._rates[next(iter(self._rates))]

    def told(self, now_ns: int) -> list[pb.PeerRate]:
        """For a heartbeat. How old a rate may be that still counts is the master's to say."""
        return [
            pb.PeerRate(
                node_id=node_id,
                bytes_per_s=measured.bytes_s,
                basis_bytes=measured.basis_bytes,
                age_s=max(0, now_ns - measured.measured_ns) / 1e9,
            )
            for node_id, measured in self._rates.items()
        ]
