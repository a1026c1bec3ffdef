"""Transfer engines of the oracle's nodes: their descriptions, and copies in the nodes' memory as a working engine makes
them.

A changed path, a dead process and an ended put fail as they do in reality: Unreachable, StaleHandle.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from kvstore.client.core.effects import TransferEffect
from kvstore.protocol.errors import Denied, StaleHandle, Unreachable
from kvstore.transfer.agent import Rail
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import AgentInfo, EngineInfo, pack_engine, pack_region, unpack_engine
from kvstore.transfer.memory.region import Region, RemoteRegion
from kvstore.transfer.paths.batch import Span
from kvstore.transfer.paths.peer import PeerRegion

CLIENT_TRANSFER = TransferSettings(transports="shm,tcp", rails="lo")
"""Of the client under test: it maps memory of this host, and has one way to others."""


class Served(Protocol):
    """The part of a node that an engine uses."""

    node_id: int
    epoch: int
    rail: str
    fds: dict[int, int]
    puts: dict[int, tuple[bytes, int, int, int]]


@dataclass(frozen=True)
class _Place:
    """A region: a node's slab, or the part of one that an open put may write."""

    node: Served
    epoch: int
    slab: int
    offset: int
    size_bytes: int
    put_id: int = 0


def describe(node: Served) -> bytes:
    """Description as the node's engine would give it, with an unused port."""
    agent = AgentInfo("tcp", Rail(node.rail), b"kvagent1 tcp tcp1 127.0.0.1:9")
    return pack_engine(EngineInfo(f"engine-{node.node_id}-{node.epoch}", "there", (agent,), {}))


class OracleEngines:
    """The regions that were shown, and who may reach them now."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def show_slab(self, node: Served, slab: int, size_bytes: int) -> bytes:
        return self._show(_Place(node, node.epoch, slab, 0, size_bytes))

    def show_slot(self, node: Served, put_id: int, offset: int, size_bytes: int) -> bytes:
        return self._show(_Place(node, node.epoch, 1, offset, size_bytes, put_id))

    def _show(self, place: _Place) -> bytes:
        region_id = len(self._places) + 1
        self._places[region_id] = place
        return pack_region(RemoteRegion(region_id, place.size_bytes, place.epoch, {"tcp": b""}))

    def carry_out(self, move: TransferEffect, nodes: Mapping[int, Served]) -> None:
        """Make the copies. Raises Unreachable, StaleHandle, Denied."""
        for source, destination, size_bytes in move.copies:
            if (end := _theirs(source)) is not None:
                fd, at = self._reach(end, size_bytes, nodes, writing=False)
                _ours(destination, size_bytes)[:size_bytes] = os.pread(fd, size_bytes, at)
            else:
                end = _theirs(destination)
                assert end is not None
                fd, at = self._reach(end, size_bytes, nodes, writing=True)
                os.pwrite(fd, _ours(source, size_bytes), at)

    def _reach(self, end: Span, size_bytes: int, nodes: Mapping[int, Served], *, writing: bool) -> tuple[int, int]:
        """(descriptor, offset)"""
        region = end.region
        assert isinstance(region, PeerRegion)
        place = self._places[region.remote.region_id]
        node = nodes.get(place.node.node_id)
        if node is None or region.peer.info != unpack_engine(describe(node)) or not region.peer.is_connected:
            raise Unreachable(f"{region.peer.name} is not reachable by this path")
        if place.epoch != node.epoch or (place.put_id and place.put_id not in node.puts):
            raise StaleHandle("the region is closed")
        if writing and not place.put_id:
            raise Denied("the region is to be read")
        assert end.offset_bytes + size_bytes <= place.size_bytes
        return node.fds[place.slab], place.offset + end.offset_bytes


def _theirs(end: Any) -> Span | None:
    span = end if isinstance(end, Span) else Span(end)
    return span if isinstance(span.region, PeerRegion) else None


def _ours(end: Any, size_bytes: int) -> memoryview:
    if not isinstance(end, Span):
        return cast(memoryview, end)
    assert isinstance(end.region, Region)
    return end.region.part(end.offset_bytes, size_bytes)
