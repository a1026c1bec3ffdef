"""Our transfer engine as target or initiator: `python -m benchmarks.kvstore_child target|initiator`.

KVSTORE_TRANSFER_* says which way it takes.
"""

import base64
import sys
from typing import Any, Literal

from benchmarks.peer_child import SINK, SMALL_BYTES, SOURCE, Bytes, Initiator, initiator, target
from kvstore.protocol.settings import load_settings
from kvstore.transfer import Span, TransferEngine
from kvstore.transfer.config import SECTION, TransferSettings
from kvstore.transfer.memory.region import Region


def engine(name: str, *, serves: bool) -> TransferEngine:
    return TransferEngine(name, load_settings(TransferSettings, SECTION, flags={}), serves=serves)


class KvstoreInitiator(Initiator):
    def __init__(self, memory: Bytes, described: dict[str, str]) -> None:
        self._engine = engine("initiator", serves=False)
        self._local = self._engine.register(memory)
        peer = self._engine.connect(base64.b64decode(described["engine"]))
        self._remote = self._engine.import_region(peer, base64.b64decode(described["region"]))
        self.copy("read", SINK, SOURCE, SMALL_BYTES, 1)  # connecting is not what is measured; UCX takes 0.4 s for it

    def copy(self, operation: Literal["read", "write"], here: int, there: int, block_bytes: int, blocks: int) -> None:
        ends = [
            (Span(self._local, here + offset), Span(self._remote, there + offset)) for offset in range(0, blocks * block_bytes, block_bytes)
        ]
        if operation == "read":
            self._engine.transfer([(remote, local, block_bytes) for local, remote in ends])
        else:
            self._engine.transfer([(local, remote, block_bytes) for local, remote in ends])


kept: list[tuple[TransferEngine, Region]] = []
"""A target's engine and region serve as long as they live."""


def start_target(memory: Bytes) -> dict[str, Any]:
    """Shows that memory, or a copy that peers can map where bytes go through shared memory."""
    found = engine("target", serves=True)
    if found.settings.transports == "shm":
        region = found.allocate(memory.nbytes)
        region.memory[:] = memory.data
    else:
        region = found.register(memory)
    kept.append((found, region))
    parts = {"engine": found.describe(), "region": found.export(region, writable=True)}
    return {name: base64.b64encode(part).decode() for name, part in parts.items()}


if __name__ == "__main__":
    if sys.argv[1] == "target":
        target(start_target)
    else:
        initiator(KvstoreInitiator)
