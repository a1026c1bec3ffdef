"""Objects in processes of their own, called together: the ranks of an executor, each with its own memory and its own Python.

Processes are forked from a server that has imported the slow modules. They end with this program in every case.
"""

import importlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final

PRELOADED: Final = (
    "torch.distributed",
    "safetensors.torch",
    "transformers.models.llama.modeling_llama",
    "kvstore.handover.transceiver",
    "kvstore.client.tensors.cache",
)
DEADLINE_S: Final = 120.0
"""For one call. The first one also waits until torch and transformers are imported, and the longest one trains the model."""
END_TIMEOUT_S: Final = 5.0
"""Time for a process to end before it is killed."""


def preload() -> None:
    """Have processes forked from one that imports torch and transformers, once for all, and begins now. To be called before the first."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()


class WorkerFailed(Exception):
    """A call raised in a process, or did not return in time, or the process is gone. All of its group should be closed."""


class Workers:
    """`made` are (module, class, keyword arguments) of the objects, one a process. A context manager that ends the processes."""

    def __init__(self, name: str, made: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
        context = multiprocessing.get_context("forkserver")
        self.name = name
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for index, (module, kind, arguments) in enumerate(made):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, module, kind, arguments), name=f"{name}-{index}", daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all objects. The results of all, in order, or the first failure: the others may wait for the one that failed."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            try:
                pipe.send((method, arguments))
            except OSError:
                raise WorkerFailed(f"{process.name} has ended") from None
        until_s = time.monotonic() + DEADLINE_S
        results: list[Any] = [None] * len(self._pipes)
        waiting = {pipe: index for index, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), max(0.0, until_s - time.monotonic()))
            if not ready:
                late = ", ".join(self._processes[index].name for index in waiting.values())
                raise WorkerFailed(f"{late}: {method} has taken more than {DEADLINE_S:g} s")
            for answered in ready:
                assert isinstance(answered, Connection)
                index = waiting.pop(answered)
                results[index] = _result(answered, f"{method} of {self._processes[index].name}")
        return results

    def close(self) -> None:
        """End the processes. A second close is a no-op."""
        for pipe in self._pipes:
            pipe.close()
        until_s = time.monotonic() + END_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, until_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _result(pipe: Connection, call: str) -> Any:
    try:
        is_right, value = pipe.recv()
    except (EOFError, OSError):
        raise WorkerFailed(f"{call}: the process has ended") from None
    if not is_right:
        raise WorkerFailed(f"{call} failed\n{value}")
    return value


def _serve(pipe: Connection, module: str, kind: str, arguments: dict[str, Any]) -> None:
    """Make the object, and execute the program's calls until it closes the pipe. An object that could not be made fails the first call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program receives it, too, and closes the pipe
    served: Any = None
    failure = ""
    try:
        served = getattr(importlib.import_module(module), kind)(**arguments)
    except Exception:
        failure = traceback.format_exc()
    try:
        while True:
            method, values = pipe.recv()
            pipe.send((False, failure) if failure else _answer(served, method, values))
    except (EOFError, OSError):
        if served is not None:
            served.close()


def _answer(served: Any, method: str, values: Sequence[Any]) -> tuple[bool, Any]:
    try:
        return True, getattr(served, method)(*values)
    except Exception:
        return False, traceback.format_exc()
