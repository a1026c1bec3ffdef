"""NIXL over UCX, as target or initiator: `python -m benchmarks.nixl_child target|initiator`. Its wheel brings no benchmark of its own.

Does what NIXL's separate benchmark does: a request is prepared once, posted again and again, and polled. UCX_TLS says how bytes go.
"""

import base64
import importlib
import sys
from typing import Any, Final, Literal

from benchmarks.peer_child import Bytes, Initiator, initiator, target

DRAM: Final = "DRAM"


def agent(name: str, memory: Bytes, *, is_polled: bool) -> Any:
    """A NIXL agent with `memory` registered. One that its own thread polls does without NIXL's, which would only compete with it."""
    api = importlib.import_module("nixl_cu12._api")
    found = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=not is_polled))
    found.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], DRAM)
    return found


class NixlInitiator(Initiator):
    def __init__(self, memory: Bytes, described: dict[str, Any]) -> None:
        self._agent = agent("initiator", memory, is_polled=True)
        self._address, self._remote_address = memory.ctypes.data, described["address"]
        self._remote = self._agent.add_remote_agent(base64.b64decode(described["metadata"]))
        self._prepared: dict[tuple[str, int, int, int, int], Any] = {}

    def copy(self, operation: Literal["read", "write"], here: int, there: int, block_bytes: int, blocks: int) -> None:
        key = (operation, here, there, block_bytes, blocks)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(*key)
        handle = self._prepared[key]
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL failed a {operation}: {state}")

    def _prepare(self, operation: str, here: int, there: int, block_bytes: int, blocks: int) -> Any:
        local, remote = (
            self._agent.get_xfer_descs([(begin + i * block_bytes, block_bytes, 0) for i in range(blocks)], DRAM)
            for begin in (self._address + here, self._remote_address + there)
        )
        return self._agent.initialize_xfer(operation.upper(), local, remote, self._remote)


agents: list[Any] = []
"""Kept, for a target's agent serves as long as it lives."""


def start_target(memory: Bytes) -> dict[str, Any]:
    agents.append(agent("target", memory, is_polled=False))
    return {"metadata": base64.b64encode(agents[0].get_agent_metadata()).decode(), "address": memory.ctypes.data}


if __name__ == "__main__":
    if sys.argv[1] == "target":
        target(start_target)
    else:
        initiator(NixlInitiator)
