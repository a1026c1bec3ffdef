"""Blocks fetched from another node: one connection, one Read, values straight into the memory given, each checked. Blocking and without
state, for a thread of its own: what is fetched, and what becomes of it, is store/replicas/queue.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvstore.protocol.errors import ChecksumMismatch, KVStoreError, ProtocolError, StaleHandle, Unavailable
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.node_messages import INLINE, LATER, MISS, Blocks, Read
from kvstore.protocol.session_messages import SERVER_NODE, Hello
from kvstore.rpc.address import Address, is_here, parse_address
from kvstore.rpc.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.tiers.value_codec import is_raw_tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A node as the master tells of it: `unix` ("" for none) works where it is the socket that `host_id` tells of."""

    node_id: int
    host_id: str
    unix: str
    tcp: str


class Wanted(NamedTuple):
    """A block of one generation, its checksum as it was put, and `size_bytes` of memory for it, which stays the caller's."""

    key: bytes
    generation: int
    checksum: int
    destination: memoryview


def fetch(source: Source, hello: Hello, wanted: Sequence[Wanted], deadline: Deadline) -> list[int | KVStoreError]:
    """For each block the xxh3_64 of the bytes that are in the destination now, or why they are not; its content is undefined then.

    It is the checksum wanted, but for a raw tensor value of which the source has only what came back from an encoded copy.

    Raises Unavailable, DeadlineExceeded, ProtocolError, or the source's refusal (Unauthorized, StaleEpoch): nothing has been fetched.
    """
    channel = _open(source, hello, deadline)
    said = [(LATER, 0)] * len(wanted)
    """By the source of each: its status, and the checksum of what it sent."""
    try:
        while left := [index for index, (status, _) in enumerate(said) if status == LATER]:
            part = [wanted[index] for index in left]
            blocks = channel.call(Read([one.key for one in part], [one.generation for one in part], MAX_VALUE_BYTES, 0), Blocks, deadline)
            _check(source, blocks, part)
            channel.read_into([one.destination for one, status in zip(part, blocks.statuses, strict=True) if status == INLINE], deadline)
            for index, status, served in zip(left, blocks.statuses, blocks.checksums, strict=True):
                said[index] = status, served
    finally:
        channel.close()
    return [_verdict(source, one, status, served) for one, (status, served) in zip(wanted, said, strict=True)]


def _open(source: Source, hello: Hello, deadline: Deadline) -> Channel:
    if is_here(source.unix, source.host_id):
        try:
            return _open_at(Address(unix=source.unix), source, hello, deadline)
        except Unavailable:  # gone since: TCP does as well
            pass
    return _open_at(parse_address(source.tcp), source, hello, deadline)


def _open_at(address: Address, source: Source, hello: Hello, deadline: Deadline) -> Channel:
    """Raises Unavailable too when it is not the source that answers: its node id is unique under the master that both obey."""
    channel = Channel.open(address, hello, deadline)
    if (channel.welcome.server, channel.welcome.node_id) != (SERVER_NODE, source.node_id):
        channel.close()
        raise Unavailable(f"at {address} there is {channel.welcome.name!r}, not node {source.node_id}")
    return channel


def _check(source: Source, blocks: Blocks, wanted: Sequence[Wanted]) -> None:
    """Raises ProtocolError unless the values that follow are those asked for: their bytes go where a value of another size has no room."""
    if len(blocks.statuses) != len(wanted) or not set(blocks.statuses) <= {INLINE, MISS, LATER}:
        raise ProtocolError(f"node {source.node_id} did not send the {len(wanted)} blocks that it was asked for")
    for one, status, size_bytes in zip(wanted, blocks.statuses, blocks.sizes, strict=True):
        if status == INLINE and size_bytes != len(one.destination):
            raise ProtocolError(f"node {source.node_id} has {size_bytes} bytes for a block of {len(one.destination)}")


def _verdict(source: Source, one: Wanted, status: int, served: int) -> int | KVStoreError:
    """`served` is what the source says of the bytes: it counts against the checksum wanted only where a codec may have changed them."""
    if status == MISS:
        return StaleHandle(f"node {source.node_id} does not have the block in this generation any more")
    found = xxhash.xxh3_64_intdigest(one.destination)
    if found != one.checksum and not (found == served and is_raw_tensor(one.destination)):
        return ChecksumMismatch(f"node {source.node_id} sent a value whose xxh3_64 is not the one recorded")
    return found
