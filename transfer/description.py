"""Descriptions of engines and regions, as bytes that the application distributes.

An engine's description is JSON, for people to read too; a region's is packed, as there may be many. Input is not
trusted.
"""

import base64
import ipaddress
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.transfer.agent import Rail
from kvstore.transfer.memory.region import RemoteRegion

VERSION: Final = 1
MAX_DESCRIPTION_BYTES: Final = 256 << 10
MAX_AGENTS: Final = 256
MAX_REGION_DESCRIPTION_BYTES: Final = 128 << 10
_REGION: Final = struct.Struct("<BQQQBB")
"""Version, id, size, key, length of the location, number of descriptors. Then the location and, per descriptor:"""
_DESCRIPTOR: Final = struct.Struct("<BI")
"""length of the transport's name and of the bytes, then both."""


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """One agent of an engine: its transport, its rail, and its metadata."""

    transport: str
    rail: Rail
    metadata: bytes


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Address of an engine: its agents and rails.

    `host` is its network (rpc.address.network_id). `matrix` gives the (preferred, available) rails by location of
    memory, as the topology does.
    """

    name: str
    host: str
    agents: tuple[AgentInfo, ...] = ()
    matrix: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)
    """Presented by peers when they join; b"" for an engine without authentication."""


def pack_engine(info: EngineInfo) -> bytes:
    agents = [
        {
            "transport": agent.transport,
            "device": agent.rail.device,
            "address": agent.rail.address,
            "numa_node": agent.rail.numa_node,
            "speed_gbit_s": agent.rail.speed_gbit_s,
            "metadata": base64.b64encode(agent.metadata).decode(),
        }
        for agent in info.agents
    ]
    whole = {"kvstore_engine": VERSION, "name": info.name, "host": info.host, "agents": agents, "matrix": info.matrix}
    if info.secret:
        whole["secret"] = info.secret.hex()
    return json.dumps(whole, separators=(",", ":")).encode()


def unpack_engine(data: bytes) -> EngineInfo:
    """Raises ProtocolError unless `data` is an engine's description of this version."""
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise ProtocolError(f"an engine's description of {len(data)} bytes is over the limit of {MAX_DESCRIPTION_BYTES}")
    try:
        whole = json.loads(data)
        version = whole["kvstore_engine"]
        if version != VERSION:
            raise ProtocolError(
                f"the peer's engine describes itself in version {version!r}, this side reads {VERSION}: run the same release"
            )
        agents = tuple(_agent(entry) for entry in _list(whole["agents"])[: MAX_AGENTS + 1])
        matrix = {str(location): (_names(rails[0]), _names(rails[1])) for location, rails in whole["matrix"].items()}
        secret = bytes.fromhex(_text(whole.get("secret", "")))
        info = EngineInfo(_text(whole["name"]), _text(whole["host"]), agents, matrix, secret)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"these bytes do not describe a transfer engine: {error!r}") from None
    if len(agents) > MAX_AGENTS or not info.name:
        raise ProtocolError(f"an engine has a name and at most {MAX_AGENTS} agents")
    return info


def _agent(entry: Mapping[str, Any]) -> AgentInfo:
    speed = float(entry["speed_gbit_s"])
    if not 0 <= speed < math.inf:
        raise ValueError("a speed is a finite number, 0 if unknown")
    rail = Rail(_text(entry["device"]), _address(entry["address"]), int(entry["numa_node"]), speed)
    return AgentInfo(_text(entry["transport"]), rail, base64.b64decode(entry["metadata"], validate=True))


def _address(value: Any) -> str:
    """Return an IP address or "". A zone is refused: it would name an interface of the peer's host."""
    address = _text(value)
    if address and "%" in str(ipaddress.ip_address(address)):
        raise ValueError("an address with a zone")
    return address


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _names(value: Any) -> tuple[str, ...]:
    return tuple(_text(name) for name in _list(value))


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 255:
        raise TypeError("not a text of at most 255 characters")
    value.encode()  # raises for half a surrogate pair
    return value


def pack_region(region: RemoteRegion) -> bytes:
    """Raises InvalidArgument if the location has more than 255 bytes."""
    location = region.location.encode()
    if len(location) > 255:
        raise InvalidArgument(f"the location of a region is cpu:N or the like, not a text of {len(location)} bytes")
    parts = [_REGION.pack(VERSION, region.region_id, region.size_bytes, region.key, len(location), len(region.descriptors)), location]
    for transport, descriptor in region.descriptors.items():
        name = transport.encode()
        parts += [_DESCRIPTOR.pack(len(name), len(descriptor)), name, descriptor]
    return b"".join(parts)


def unpack_region(data: bytes) -> RemoteRegion:
    """Raises ProtocolError unless `data` is a region's description of this version."""
    if len(data) > MAX_REGION_DESCRIPTION_BYTES:
        raise ProtocolError(f"a region's description of {len(data)} bytes is over the limit of {MAX_REGION_DESCRIPTION_BYTES}")
    try:
        version, region_id, size_bytes, key, location_bytes, count = _REGION.unpack_from(data)
        if version != VERSION:
            raise ProtocolError(f"the peer describes regions in version {version}, this side reads {VERSION}: run the same release")
        at = _REGION.size
        location, at = _take(data, at, location_bytes)
        descriptors: dict[str, bytes] = {}
        for _ in range(count):
            name_bytes, descriptor_bytes = _DESCRIPTOR.unpack_from(data, at)
            name, at = _take(data, at + _DESCRIPTOR.size, name_bytes)
            descriptors[name.decode()], at = _take(data, at, descriptor_bytes)
        region = RemoteRegion(region_id, size_bytes, key, descriptors, location.decode())
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"these bytes do not describe a region: {error}") from None
    if at != len(data) or not size_bytes:
        raise ProtocolError("these bytes do not describe a region: their length is wrong")
    return region


def _take(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise struct.error("it ends too early")
    return data[at : at + size], at + size
