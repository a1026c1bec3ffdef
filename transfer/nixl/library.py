"""Binding to the NIXL library: one native agent with the UCX back end.

Uses NIXL's native module, not its Python class, which fixes the period of the progress thread at 0: that thread then
spins on a core (measured: 1.0 CPU idle, 0.005 with a period). Keeps no state of transfers. Source: NIXL 1.5.1; UCX as
its wheel brings it.
"""

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Final

from kvstore.protocol.errors import ConfigError, KVStoreError, ProtocolError, Unreachable
from kvstore.protocol.extras import install_line
from kvstore.transfer.agent import Direction, Rail
from kvstore.transfer.memory.region import Region
from kvstore.transfer.nixl.descriptors import Rows

PACKAGES: Final = ("nixl_cu12", "nixl_cu13")
"""Packages of NIXL's wheels; both run without a GPU."""
PROGRESS_PERIOD_US: Final = 10_000
"""Period of the progress thread, which bounds the delay of a wake-up that UCX missed."""
ENVIRONMENT: Final = {
    # The wheel's EFA module loads the system's libefa, whose libnl conflicts with the wheel's: the process crashes at exit.
    "UCX_MODULES": "^efa",
    # UCX logs a warning for each operation left over from a stalled peer.
    "UCX_LOG_LEVEL": "fatal",
    # Errors are raised to the caller.
    "NIXL_LOG_LEVEL": "FATAL",
}
"""Set while NIXL and UCX are loaded, unless the user has set them."""
_environment_lock = threading.Lock()


class NixlProgress(Enum):
    """State of a transfer."""

    UNDER_WAY = "under way"
    DONE = "done"
    DISCONNECTED = "disconnected"
    """The connection failed; none of its operations continues."""
    FAILED = "failed"
    """An operation failed; others of the transfer may continue."""


def bindings() -> Any:
    """Return NIXL's native module. Raises ConfigError if it is not installed."""
    raises = logging.raiseExceptions  # the import changes it for the whole process
    try:
        for package in PACKAGES:
            try:
                return importlib.import_module(f"{package}._bindings")
            except ModuleNotFoundError:
                continue
        raise ConfigError(f"the transport nixl needs the NIXL library: {install_line('nixl')}")
    except ImportError as error:
        raise ConfigError(f"the NIXL library does not load: {error}") from error
    finally:
        logging.raiseExceptions = raises


class NativeAgent:
    """One NIXL agent. Calls are serialised (NIXL's strict mode). A handle must not be used after its release, nor
    anything after `close`.
    """

    def __init__(self, name: str, rail: Rail) -> None:
        """`name` is globally unique. Raises ConfigError: no library, or no such device."""
        with _quiet_environment():
            self._nixl = bindings()
        self._errors = tuple(value for key, value in vars(self._nixl).items() if key.endswith("Error")) + (RuntimeError,)
        self.name = name
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_PERIOD_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        with _quiet_environment(), self._translated(f"NIXL cannot use the rail {rail.device or 'any'!r}", ConfigError):
            self._agent = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", _backend_options(rail))
        self._operations = {Direction.READ: self._nixl.NIXL_READ, Direction.WRITE: self._nixl.NIXL_WRITE}
        self._progress = {self._nixl.NIXL_IN_PROG: NixlProgress.UNDER_WAY, self._nixl.NIXL_SUCCESS: NixlProgress.DONE}

    def register(self, region: Region) -> None:
        """Raises ConfigError: the memory cannot be registered, most likely for a limit of locked memory."""
        with self._translated(f"region {region.region_id} cannot be registered with NIXL; see ulimit -l", ConfigError):
            self._agent.registerMem(self._registration(region), [])

    def deregister(self, region: Region) -> None:
        self._agent.deregisterMem(self._registration(region), [])

    def describe(self, region: Region | None = None) -> bytes:
        """Return what a peer must load to reach this agent, or a region registered here: NIXL's bytes, about 300."""
        regions = self._nixl.nixlRegDList(self._nixl.DRAM_SEG) if region is None else self._registration(region)
        described: bytes = self._agent.getLocalPartialMD(regions, region is None, [])
        return described

    def load(self, described: bytes) -> str:
        """Load a peer, or a region of a loaded peer; returns the name of its agent. Raises Unreachable, ProtocolError.

        After an error NIXL's state of that peer is undefined: use another agent.
        """
        try:
            with self._translated("the peer cannot be reached by NIXL", Unreachable):
                loaded: bytes = self._agent.loadRemoteMD(described)
        except Unreachable as error:
            if isinstance(error.__cause__, self._nixl.nixlMismatchError | self._nixl.nixlInvalidParamError):
                raise ProtocolError("not a description that NIXL has made") from error
            raise
        return loaded.decode()

    def forget(self, peer: str) -> None:
        """Disconnect from a peer that has no transfer in flight."""
        self._agent.invalidateRemoteMD(peer)

    def prepare(self, direction: Direction, local: Rows, remote: Rows, peer: str) -> int:
        """Return the handle of a transfer between rows of equal sizes. Raises Unreachable."""
        memory = self._nixl.DRAM_SEG
        here, there = self._nixl.nixlXferDList(memory, local), self._nixl.nixlXferDList(memory, remote)
        with self._translated("NIXL knows no way to the peer's memory", Unreachable):
            handle: int = self._agent.createXferReq(self._operations[direction], here, there, peer, b"", [])
        return handle

    def post(self, handle: int) -> NixlProgress:
        """Begin a prepared transfer. Copies within a host are done on return."""
        return self._outcome(self._agent.postXferReq, handle, b"")

    def progress(self, handle: int) -> NixlProgress:
        """Return the transfer's state; also makes progress."""
        return self._outcome(self._agent.getXferStatus, handle)

    def release(self, handle: int) -> None:
        """Release a transfer. One in flight may continue until `close`."""
        self._agent.releaseXferReq(handle)

    def notify(self, peer: str, message: bytes) -> None:
        """Raises Unreachable."""
        with self._translated("the peer cannot be notified by NIXL", Unreachable):
            self._agent.genNotif(peer, message, [])

    def notifications(self) -> dict[str, list[bytes]]:
        """Return the messages received, by the name of the sending agent."""
        found: dict[str, list[bytes]] = self._agent.getNotifs({}, [])
        return found

    def close(self) -> None:
        """Stop its thread and connections. On return no byte moves and its registrations are gone."""
        del self._agent

    def _registration(self, region: Region) -> Any:
        # The region's id takes the place of the device number: NIXL keeps closed regions that it loaded, and would confuse one with
        # another at the same address.
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(region.address, region.size_bytes, region.region_id, "")])

    def _outcome(self, call: Any, *args: Any) -> NixlProgress:
        try:
            return self._progress[call(*args)]
        except self._nixl.nixlRemoteDisconnectError:
            return NixlProgress.DISCONNECTED
        except self._errors:
            return NixlProgress.FAILED

    @contextmanager
    def _translated(self, message: str, kind: type[KVStoreError]) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise kind(f"{message}: {error}") from error


def _backend_options(rail: Rail) -> dict[str, str]:
    if not rail.device:
        return {}
    # UCX requires the port of an InfiniBand device, and only the interface of any other.
    is_infiniband = Path("/sys/class/infiniband", rail.device).exists()
    return {"engine_config": f"NET_DEVICES={rail.device}{':1' if is_infiniband else ''}"}


@contextmanager
def _quiet_environment() -> Iterator[None]:
    with _environment_lock:
        added = [name for name in ENVIRONMENT if name not in os.environ]
        os.environ.update({name: ENVIRONMENT[name] for name in added})
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]
