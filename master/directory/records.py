"""Format of the catalog's records: the durable part of the directory. Pure.

Blocks are columns (BlockPuts, BlockDeletes) in the catalog's own format. The small records are bytes:

    key                                             value
    b"n" + node name                                <u32 node id>, and <u64 generation>, the node's removal horizon, while it has one
    b"f"                                            <u64 generation, u32 node id>: removal horizon of unknown nodes; ids up to this one
                                                    are used
    b"d" + u8 part + node name                      a part of <u8 version, u64 xxh3 of the rest, u32 topology bytes>, topology, transfer
    b"e"                                            <u64 generation>: upper bound of all granted generations
    b"s" + node name                                empty: the node's process ended in order, and has not returned
    b"g" + node name                                "peers" or "nvme": the node is drained, to this destination
    b"p" + u8 tenant length + tenant + block key    empty: the block is pinned; or <u64 ms>: until then, by the wall clock
    b"t" + u8 tenant length + tenant + block key    <u8>: the block's replica target
    b"r" + u8 tenant length + tenant + block key    <u64 generation>: tombstone of this version and all before it
    b"q" + tenant                                   <u8 field of TenantQuota, u64 limit> for each limit that an operator has set
    b"w" and b"i"                                   weights_records.py
    b"a"                                            audit_log.py

Tier masks are not stored: a node's inventory has them after a restart. Holders are hints for the same reason. All
integers are little-endian. A change of the format raises the version; records of another version are refused."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Op
from kvstore.master.directory.weights_records import NamespaceRecord, WeightsRecord, read_namespace, read_weights
from kvstore.protocol.errors import Corrupt, InvalidArgument
from kvstore.security.quotas.limits import NamedLimits
from kvstore.security.quotas.quota import NAMES

VERSION: Final = 1
MAX_TENANT_BYTES: Final = 128
"""The catalog's limit; with a key of 255 bytes a small record's key stays below its limit of 400."""
MAX_NAME_BYTES: Final = 255
MAX_DESCRIPTION_BYTES: Final = 256 << 10
"""Of a node's topology, and of its transfer engine's description."""
PART_BYTES: Final = 60 << 10
"""A description is split into records of this size: a catalog's values are at most 64 KiB."""

TO_PEERS, TO_NVME = "peers", "nvme"
DRAINS: Final = (TO_PEERS, TO_NVME)
"""Destination of a drained node's blocks: nodes that stay, or its own NVMe, with which it returns."""

_ID: Final = struct.Struct("<I")
_NODE: Final = struct.Struct("<IQ")
_GENERATION: Final = struct.Struct("<Q")
_UNTIL: Final = struct.Struct("<Q")
_UNKNOWN_NODES: Final = struct.Struct("<QI")
_DESCRIPTION: Final = struct.Struct("<BQI")
_LIMIT: Final = struct.Struct("<BQ")
_NO_LIMIT: Final = (1 << 64) - 1


class Version(NamedTuple):
    """One put of a block: size and checksum of its bytes, the put's generation, its namespace and parent key (b""
    for none)."""

    size: int
    checksum: int
    generation: int
    namespace: str
    parent: bytes


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node. It must drop blocks up to `removal_horizon`; 0 for none."""

    name: str
    node_id: int
    removal_horizon: int = 0


@dataclass(frozen=True, slots=True)
class UnknownNodesRecord:
    """State for unknown nodes: their removal horizon, and the highest node id ever used, possibly by a forgotten
    node."""

    removal_horizon: int
    last_node_id: int


@dataclass(frozen=True, slots=True)
class GrantedRecord:
    """Generations up to `generation` may have been granted, published or not."""

    generation: int


@dataclass(frozen=True, slots=True)
class DrainRecord:
    """The node `name` is drained; `to` is one of DRAINS."""

    name: str
    to: str


@dataclass(frozen=True, slots=True)
class StoppedRecord:
    """The process of node `name` ended in order."""

    name: str


class Description(NamedTuple):
    """A node's description of its topology and transfer engine, for its peers: both are opaque to the master."""

    topology: bytes = b""
    transfer: bytes = b""


NO_DESCRIPTION: Final = Description()


@dataclass(frozen=True, slots=True)
class DescriptionPart:
    """A part of the description of the node `name`; `join_description` joins them."""

    name: str
    part: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A pin. `until_ms` is its end by the wall clock; 0 for none."""

    tenant: str
    key: bytes
    until_ms: int = 0


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """A block's replica target."""

    tenant: str
    key: bytes
    count: int


@dataclass(frozen=True, slots=True)
class RemovedRecord:
    """Tombstone of a removed block, up to `generation`."""

    tenant: str
    key: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class QuotaRecord:
    """Limits of the tenant that operators have set; at least one."""

    tenant: str
    limits: NamedLimits


def check_tenant(tenant: str) -> None:
    """Raise InvalidArgument for a tenant over MAX_TENANT_BYTES, or one that is not valid text."""
    try:
        size = len(tenant.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"the tenant's name {tenant!r} is not valid Unicode text") from None
    if size > MAX_TENANT_BYTES:
        raise InvalidArgument(f"a tenant's name is at most {MAX_TENANT_BYTES} bytes long, not {size}")


def tenant_prefix(tenant: str) -> bytes:
    """Return the prefix of a tenant's record keys, after the kind's letter."""
    name = tenant.encode()
    return bytes((len(name),)) + name


def put_block(tenant: str, key: bytes, version: Version, holders: Sequence[int]) -> BlockPuts:
    size, checksum, generation, namespace, parent = version
    return BlockPuts(tenant, [key], (size,), (checksum,), (generation,), (namespace,), (parent,), (tuple(sorted(holders)),))


def delete_block(tenant: str, key: bytes) -> BlockDeletes:
    return BlockDeletes(tenant, (key,))


def put_node(name: str, node_id: int, removal_horizon: int) -> Op:
    """One record, so that a node is never known without its removal horizon."""
    return Op(b"n" + name.encode(), _NODE.pack(node_id, removal_horizon) if removal_horizon else _ID.pack(node_id))


def delete_node(name: str) -> Op:
    return Op(b"n" + name.encode(), None)


def put_unknown_nodes(removal_horizon: int, last_node_id: int) -> Op:
    return Op(b"f", _UNKNOWN_NODES.pack(removal_horizon, last_node_id))


def put_granted(generation: int) -> Op:
    return Op(b"e", _GENERATION.pack(generation))


def put_description(name: str, description: Description, former: Description) -> list[Op]:
    """Return the operations that replace `former` by `description`."""
    if description == former:
        return []
    parts = _parts(description)
    ops = [Op(_part_key(name, part), data) for part, data in enumerate(parts)]
    return ops + [Op(_part_key(name, part), None) for part in range(len(parts), len(_parts(former)))]


def join_description(parts: Sequence[DescriptionPart]) -> Description:
    """Return the description made of these parts, in any order. Raises Corrupt for one of another release.

    If the parts do not fit together it is empty: the master died while it was written, and its node will send it
    again."""
    in_order = sorted(parts, key=lambda part: part.part)
    data = b"".join(part.data for part in in_order)
    if len(data) < _DESCRIPTION.size or in_order[0].part:
        return NO_DESCRIPTION
    form, checksum, topology_bytes = _DESCRIPTION.unpack_from(data)
    if form != VERSION:
        raise Corrupt(f"a catalog record has form {form}, this release reads {VERSION}")
    rest = data[_DESCRIPTION.size :]
    if xxhash.xxh3_64_intdigest(rest) != checksum:
        return NO_DESCRIPTION
    return Description(rest[:topology_bytes], rest[topology_bytes:])


def _parts(description: Description) -> list[bytes]:
    if description == NO_DESCRIPTION:
        return []
    rest = description.topology + description.transfer
    data = _DESCRIPTION.pack(VERSION, xxhash.xxh3_64_intdigest(rest), len(description.topology)) + rest
    return [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]


def _part_key(name: str, part: int) -> bytes:
    return b"d" + bytes((part,)) + name.encode()


def put_drain(name: str, to: str) -> Op:
    return Op(b"g" + name.encode(), to.encode())


def delete_drain(name: str) -> Op:
    return Op(b"g" + name.encode(), None)


def put_stopped(name: str) -> Op:
    return Op(b"s" + name.encode(), b"")


def delete_stopped(name: str) -> Op:
    return Op(b"s" + name.encode(), None)


def pin(prefix: bytes, key: bytes, *, until_ms: int = 0) -> Op:
    """See PinRecord."""
    return Op(b"p" + prefix + key, _UNTIL.pack(until_ms) if until_ms else b"")


def unpin(prefix: bytes, key: bytes) -> Op:
    return Op(b"p" + prefix + key, None)


def put_target(prefix: bytes, key: bytes, count: int) -> Op:
    return Op(b"t" + prefix + key, bytes((count,)))


def delete_target(prefix: bytes, key: bytes) -> Op:
    return Op(b"t" + prefix + key, None)


def removed(prefix: bytes, key: bytes, generation: int | None) -> Op:
    """Add a tombstone, or delete it (None)."""
    return Op(b"r" + prefix + key, None if generation is None else _GENERATION.pack(generation))


def put_quota(tenant: str, limits: NamedLimits) -> Op:
    """See QuotaRecord; `limits` has at least one."""
    packed = [_LIMIT.pack(1 + NAMES.index(name), _NO_LIMIT if limit is None else limit) for name, limit in limits.items()]
    return Op(b"q" + tenant.encode(), b"".join(packed))


def delete_quota(tenant: str) -> Op:
    return Op(b"q" + tenant.encode(), None)


def _limits(value: bytes) -> NamedLimits:
    """Limits of later releases are ignored, as in security/quotas/limits.py."""
    found = [(field, limit) for field, limit in _LIMIT.iter_unpack(value) if 1 <= field <= len(NAMES)]
    return {NAMES[field - 1]: None if limit == _NO_LIMIT else limit for field, limit in found}


Record = (
    NodeRecord
    | UnknownNodesRecord
    | GrantedRecord
    | DescriptionPart
    | DrainRecord
    | StoppedRecord
    | PinRecord
    | TargetRecord
    | RemovedRecord
    | QuotaRecord
    | WeightsRecord
    | NamespaceRecord
)


def decode(key: bytes, value: bytes) -> Record:
    """Return the record of one small catalog entry.

    Raises Corrupt if it is none: the catalog belongs to something else, to another release, or is damaged."""
    try:
        if key[:1] == b"n":
            return NodeRecord(key[1:].decode(), *(_ID.unpack(value) if len(value) == _ID.size else _NODE.unpack(value)))
        if key == b"f":
            return UnknownNodesRecord(*_UNKNOWN_NODES.unpack(value))
        if key == b"e":
            return GrantedRecord(*_GENERATION.unpack(value))
        if key[:1] == b"d":
            return DescriptionPart(key[2:].decode(), key[1], value)
        if key[:1] == b"g" and value.decode() in DRAINS:
            return DrainRecord(key[1:].decode(), value.decode())
        if key[:1] == b"s" and not value:
            return StoppedRecord(key[1:].decode())
        if key[:1] == b"p":
            return PinRecord(*block_of(key), *(_UNTIL.unpack(value) if value else ()))
        if key[:1] == b"t":
            return TargetRecord(*block_of(key), *struct.unpack("<B", value))
        if key[:1] == b"r":
            return RemovedRecord(*block_of(key), *_GENERATION.unpack(value))
        if key[:1] == b"q":
            return QuotaRecord(key[1:].decode(), _limits(value))
        if key[:1] == b"w":
            return read_weights(key, value)
        if key[:1] == b"i":
            return read_namespace(*block_of(key), key, value)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise Corrupt(f"the catalog's record {key!r} is damaged: {error}") from None
    raise Corrupt(f"the catalog's record {key!r} is not one of kvstore's: is the catalog shared with something else?")


KINDS: Final[dict[bytes, type[Record]]] = {b"d": DescriptionPart, b"p": PinRecord, b"t": TargetRecord, b"r": RemovedRecord}
"""Records that are stored with their node or block, by the first byte of their keys."""


def described_by(key: bytes) -> str:
    """Return the node of a DescriptionPart's key."""
    return key[2:].decode()


def block_of(key: bytes) -> tuple[str, bytes]:
    """Return tenant and key of the block of a PinRecord's, TargetRecord's or RemovedRecord's key."""
    split = 2 + key[1]
    return key[2:split].decode(), key[split:]
