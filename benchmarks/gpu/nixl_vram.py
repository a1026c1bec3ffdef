"""NIXL between two agents of one process, from device memory to device memory, where its wheel loads."""

import contextlib
import importlib
import time
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.gpu.device import HAS_CUDA, needs_cuda, on_device, synchronize
from kvstore.cli.tools.bench import BenchRow

PACKAGES: Final = ("nixl_cu13", "nixl_cu12")
SIZE_BYTES: Final = 64 << 20
ROUNDS: Final = 5
DEADLINE_S: Final = 10.0


def rows() -> Iterator[BenchRow]:
    if not HAS_CUDA:
        yield needs_cuda("NIXL with device memory")
        return
    try:
        api = loaded()
        agents = [api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"])) for name in ("writer", "reader")]
        yield BenchRow("NIXL: device to device of another agent, UCX", moved(agents), "GB/s")
    except Exception as refusal:
        yield BenchRow(f"NIXL with device memory: {type(refusal).__name__}: {str(refusal)[:150]}", 0, "not run")


def loaded() -> Any:
    """NIXL's Python module, of the first of its distributions that loads. Raises ImportError."""
    for package in PACKAGES[:-1]:
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{package}._api")
    return importlib.import_module(f"{PACKAGES[-1]}._api")


def moved(agents: list[Any]) -> float:
    """GB/s of writes from the first agent's memory to the second's. Raises what NIXL raises, and ValueError for other bytes."""
    writer, reader = agents
    source, target = on_device(SIZE_BYTES).fill_(7), on_device(SIZE_BYTES)
    registered = [agent.register_memory([memory]) for agent, memory in ((writer, source), (reader, target))]
    name = writer.add_remote_agent(reader.get_agent_metadata())
    handle = writer.initialize_xfer("WRITE", registered[0].trim(), registered[1].trim(), name)
    taken_s = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        state = writer.transfer(handle)
        while state == "PROC" and time.perf_counter() - begun_s < DEADLINE_S:
            state = writer.check_xfer_state(handle)
        if state != "DONE":
            raise TimeoutError(f"the transfer is {state} after {time.perf_counter() - begun_s:.1f} s")
        taken_s.append(time.perf_counter() - begun_s)
    synchronize()
    if not bool((target == 7).all()):
        raise ValueError("NIXL moved other bytes")
    return SIZE_BYTES / min(taken_s) / 1e9
