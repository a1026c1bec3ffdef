"""Peers of a transfer engine by their names, and their memory by its addresses."""

import threading
from bisect import bisect_right
from dataclasses import dataclass

from kvstore.engines.mooncake.handshake import ask
from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.batch import Span
from kvstore.transfer.paths.peer import Peer, PeerRegion


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A peer as it answered."""

    peer: Peer
    first_address: int
    """Of its memory in the order of registration, 0 without any."""
    addresses: list[int]
    """Rising."""
    regions: list[PeerRegion]

    def span(self, address: int, size_bytes: int) -> Span:
        """Raises InvalidArgument: not all of it is registered memory of the peer."""
        at = bisect_right(self.addresses, address) - 1
        if at < 0 or address + size_bytes > self.addresses[at] + self.regions[at].remote.size_bytes:
            raise InvalidArgument(f"{size_bytes} bytes at address {address:#x} are no registered memory of {self.peer.name}")
        return Span(self.regions[at], address - self.addresses[at])


class Peers:
    """Thread-safe. Peers are asked at first use, and again after a failure."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._known: dict[str, KnownPeer] = {}

    def known(self, name: str) -> KnownPeer:
        """Raises Unreachable, ProtocolError."""
        with self._lock:
            found = self._known.get(name)
        return found or self.asked(name)

    def asked(self, name: str) -> KnownPeer:
        """As `known`, with its memory as it is now."""
        answer = ask(name)
        peer = self._engine.connect(answer.description)
        segments = sorted(answer.segments, key=lambda one: one.address)
        regions = [self._engine.import_region(peer, one.description) for one in segments]
        first = answer.segments[0].address if answer.segments else 0
        found = KnownPeer(peer, first, [one.address for one in segments], regions)
        with self._lock:
            self._known[name] = found
        return found

    def forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)
