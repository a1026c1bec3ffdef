"""Transfer engines for tests of a node: the node's, a remote client's, and a client that stalls within a value."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.testing.transfer import awaited
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import unpack_engine, unpack_region
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.batch import Span
from kvstore.transfer.paths.peer import PeerRegion
from tests.rpc.raw_peers import RawAsker, store

DEADLINE_S = 10.0
LOOPBACK = TransferSettings(transports="tcp", rails="lo", stall_timeout_s=2 * DEADLINE_S)
"""With a stall timeout that no test waits for: what stalls ends when the test ends it."""


class FarClient:
    """The engine of a client on another host than `node`'s; it may use regions that were never exported to it."""

    def __init__(self, node: TransferEngine) -> None:
        self._engine = TransferEngine(settings=LOOPBACK, serves=False)
        self.peer = self._engine.connect(node.describe())

    def imported(self, description: bytes) -> PeerRegion:
        return self._engine.import_region(self.peer, description)

    def read(self, region: PeerRegion, offset: int, size_bytes: int) -> bytes:
        found = bytearray(size_bytes)
        self._engine.transfer([(Span(region, offset), found, size_bytes)], deadline_s=DEADLINE_S)
        return bytes(found)

    def write(self, region: PeerRegion, value: bytes, offset: int = 0) -> None:
        self._engine.transfer([(value, Span(region, offset), len(value))], deadline_s=DEADLINE_S)

    def close(self) -> None:
        self._engine.close()


@contextmanager
def stalled_writer(node: TransferEngine, description: bytes) -> Iterator[RawAsker]:
    """A peer of the node that has sent the first byte of a value for the whole region, an "x", and stops there."""
    region, engine = unpack_region(description), unpack_engine(node.describe())
    [agent] = engine.agents
    with RawAsker(agent.metadata) as writer:
        writer.join("stalled", secret=engine.secret)
        writer.send(store([(region, 0, region.size_bytes)]), b"x", payload_bytes=region.size_bytes, deadline_ms=int(DEADLINE_S * 1000))
        yield writer


def eventually(is_so: Callable[[], bool]) -> None:
    """Wait until what another thread brings about has come about."""
    awaited.eventually(is_so, "what another thread brings about")
