"""Mooncake's Transfer Engine over TCP, as target or initiator: `python -m benchmarks.mooncake_child target|initiator`."""

import importlib
import sys
from typing import Any, Literal

from benchmarks.peer_child import Bytes, Initiator, initiator, target

HOST = "127.0.0.1"


def engine(memory: Bytes) -> Any:
    """An engine that peers find by its own handshake, with `memory` registered."""
    found = importlib.import_module("mooncake.engine").TransferEngine()
    for status in (found.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), found.register_memory(memory.ctypes.data, memory.nbytes)):
        if status:
            raise RuntimeError(f"Mooncake's engine did not start: status {status}")
    return found


class MooncakeInitiator(Initiator):
    def __init__(self, memory: Bytes, described: dict[str, Any]) -> None:
        self._engine = engine(memory)
        self._address = memory.ctypes.data
        self._session, self._remote_address = described["session"], described["address"]

    def copy(self, operation: Literal["read", "write"], here: int, there: int, block_bytes: int, blocks: int) -> None:
        local = range(self._address + here, self._address + here + blocks * block_bytes, block_bytes)
        remote = range(self._remote_address + there, self._remote_address + there + blocks * block_bytes, block_bytes)
        if blocks == 1:
            move = self._engine.transfer_sync_read if operation == "read" else self._engine.transfer_sync_write
            status = move(self._session, local[0], remote[0], block_bytes)
        else:
            batch = self._engine.batch_transfer_sync_read if operation == "read" else self._engine.batch_transfer_sync_write
            status = batch(self._session, list(local), list(remote), [block_bytes] * blocks)
        if status:
            raise RuntimeError(f"Mooncake's engine failed a {operation}: status {status}")


engines: list[Any] = []
"""Kept, for a target's engine serves as long as it lives."""


def start_target(memory: Bytes) -> dict[str, Any]:
    engines.append(engine(memory))
    return {"session": f"{HOST}:{engines[0].get_rpc_port()}", "address": memory.ctypes.data}


if __name__ == "__main__":
    if sys.argv[1] == "target":
        target(start_target)
    else:
        initiator(MooncakeInitiator)
