"""Metadata and region descriptors of NIXL agents, and conversion of pieces to NIXL's rows. Pure: no I/O, no library.

NIXL's own descriptions are carried unchanged. The rest is our format: little-endian, versioned.
"""

import struct
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import Denied, InvalidArgument, ProtocolError, StaleHandle
from kvstore.transfer.agent import Direction
from kvstore.transfer.memory.pieces import Int64s, Pieces, table_of
from kvstore.transfer.memory.region import Region, RemoteRegion

TRANSPORT: Final = "nixl"
MAGIC: Final = b"NIXL\x01"
"""Prefix of metadata; the last byte is the version."""
_METADATA: Final = struct.Struct("<5sHH")
"""Magic, lengths of the agent's name and of its server's NIXL name; both follow, then NIXL's description of the server."""
DESCRIPTOR_VERSION: Final = 1
_DESCRIPTOR: Final = struct.Struct("<BQQQ8s8sH")
"""Version, id of the region, address, size, digests of its read and write keys, length of its server's NIXL name, which
follows; then NIXL's description of the region.
"""

Rows = npt.NDArray[np.uint64]
"""Shape (n, 3): address, size in bytes, id of the region."""


class NixlRemote(NamedTuple):
    """A peer: its name, its server's NIXL name, and NIXL's description of the server."""

    name: str
    server: str
    description: bytes


class ExportedRegion(NamedTuple):
    """A peer's region, from its descriptor."""

    server: bytes
    region_id: int
    address: int
    size_bytes: int
    description: bytes


def pack_metadata(remote: NixlRemote) -> bytes:
    name, server = remote.name.encode(), remote.server.encode()
    return _METADATA.pack(MAGIC, len(name), len(server)) + name + server + remote.description


def unpack_metadata(metadata: bytes) -> NixlRemote:
    """Raises ProtocolError."""
    if len(metadata) < _METADATA.size or not metadata.startswith(MAGIC):
        raise ProtocolError("not the metadata of a NIXL agent of this version")
    _, name_size, server_size = _METADATA.unpack_from(metadata)
    server_at = _METADATA.size + name_size
    description_at = server_at + server_size
    if description_at >= len(metadata):
        raise ProtocolError(f"the metadata of a NIXL agent is cut short at {len(metadata)} bytes")
    try:
        name, server = metadata[_METADATA.size : server_at].decode(), metadata[server_at:description_at].decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("the metadata of a NIXL agent has a name that is not UTF-8") from error
    return NixlRemote(name, server, metadata[description_at:])


def pack_region(region: Region, server: str, description: bytes) -> bytes:
    digests = _digest(region.region_id, region.read_key), _digest(region.region_id, region.write_key)
    name = server.encode()
    head = _DESCRIPTOR.pack(DESCRIPTOR_VERSION, region.region_id, region.address, region.size_bytes, *digests, len(name))
    return head + name + description


def unpack_region(region: RemoteRegion, direction: Direction) -> ExportedRegion:
    """Return the exported region. The write key permits reading too.

    Raises Denied (not its key for this direction), StaleHandle (another region), InvalidArgument (not exported),
    ProtocolError.
    """
    descriptor = region.descriptors.get(TRANSPORT)
    if descriptor is None:
        raise InvalidArgument(f"region {region.region_id} was not exported by a NIXL agent")
    if len(descriptor) <= _DESCRIPTOR.size or descriptor[0] != DESCRIPTOR_VERSION:
        raise ProtocolError(f"the descriptor of region {region.region_id} is not that of a NIXL agent of this version")
    _, region_id, address, size_bytes, read_digest, write_digest, name_size = _DESCRIPTOR.unpack_from(descriptor)
    if region_id != region.region_id:
        raise StaleHandle(f"the descriptor of region {region.region_id} is that of region {region_id}")
    allowed = (write_digest,) if direction is Direction.WRITE else (read_digest, write_digest)
    if _digest(region_id, region.key) not in allowed:
        raise Denied(f"not the key to {direction.value} region {region_id}")
    name_end = _DESCRIPTOR.size + name_size
    server, description = descriptor[_DESCRIPTOR.size : name_end], descriptor[name_end:]
    return ExportedRegion(server, region_id, address, min(size_bytes, region.size_bytes), description)


def descriptor_rows(direction: Direction, pieces: Pieces) -> tuple[list[ExportedRegion], Rows, Rows]:
    """Return the peer's regions in use, and the pieces as (local rows, remote rows), without empty ones.

    Raises InvalidArgument (outside a region) and as `unpack_region`.
    """
    if not pieces:
        return [], np.empty((0, 3), np.uint64), np.empty((0, 3), np.uint64)
    table = table_of(pieces)
    exported = [unpack_region(region, direction) for region in table.remote]
    regions: list[Region | ExportedRegion] = [*table.local, *exported]
    known = np.array([(region.address, region.size_bytes, region.region_id) for region in regions], np.int64)
    # Both sides in one array: numpy calls dominate the cost of a small request.
    index = np.stack((table.local_index, table.remote_index + len(table.local)))
    rows = _rows(known[index], np.stack((table.local_offset, table.remote_offset)), table.length)
    return exported, rows[0], rows[1]


def _rows(regions: Int64s, offset: Int64s, size: Int64s) -> Rows:
    """Compute rows in place: `regions` has (address, size, id) of each side and piece. Raises InvalidArgument."""
    outside = (offset < 0) | (size < 0) | (offset > regions[:, :, 1] - size)
    if outside.any():
        at = np.unravel_index(outside.argmax(), outside.shape)
        end = int(offset[at]) + int(size[at[1]])
        raise InvalidArgument(f"bytes {offset[at]} to {end} are outside a region of {regions[at][1]} bytes")
    regions[:, :, 0] += offset
    regions[:, :, 1] = size
    if not size.all():
        regions = np.ascontiguousarray(regions[:, size > 0])  # fancy indexing may change the memory layout, and NIXL needs rows
    return regions.view(np.uint64)


def _digest(region_id: int, key: int) -> bytes:
    """Digest of a key, so that a holder of the read key cannot derive the write key."""
    return blake2b(b"%d %d" % (region_id, key), digest_size=8).digest()
