"""A transfer engine of this process under a name, and its registered memory. The calls that move bytes (engine.py) are built on it."""

import ctypes
import logging
import os
import threading
from typing import Any, Final, Self

from kvstore.client.memory import Memory
from kvstore.engines.mooncake.arguments import Number, Numbers, Text, encoded
from kvstore.engines.mooncake.peers import Answer, HandshakeServer, Peers, Segment
from kvstore.protocol.errors import Closed, KVStoreError
from kvstore.transfer.engine import TransferEngine as Engine
from kvstore.transfer.memory.region import Region

log = logging.getLogger("kvstore.engines.mooncake")

OK: Final = 0
FAILED: Final = -1
NOT_REGISTERED: Final = -3
OVERLAPPED: Final = -7
DEADLINE_S: Final = 30.0
MIN_DEADLINE_S: Final = 5.0
TIMEOUT: Final = "MC_TRANSFER_TIMEOUT"
ANYWHERE: Final = "*"


class EngineMemory:
    """Not open until `initialize`. Threads may share it."""

    def __init__(self) -> None:
        given = os.environ.get(TIMEOUT, "")
        self._deadline_s = max(MIN_DEADLINE_S, float(given)) if given.isdigit() else DEADLINE_S
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._server: HandshakeServer | None = None
        self._peers: Peers | None = None
        self._regions: dict[int, Region] = {}
        """By address, in the order of registration."""
        self._managed: dict[int, Region] = {}

    def initialize(self, local_hostname: Text, metadata_server: Text, protocol: Text, device_name: Text, /) -> int:
        """Open the engine under the name `local_hostname`, HOST or HOST:PORT. Peers find it by HOST and `get_rpc_port`: PORT if it is free.

        A metadata server, protocol and device are not used: names are addresses, and settings (`KVSTORE_TRANSFER_*`) choose transports.
        Returns 0, or -1: the address is not one of this host, or the engine is open already.
        """
        host, port = _host_and_port(local_hostname)
        with self._lock:
            if self._engine is not None:
                return FAILED
            try:
                self._engine = Engine()
                self._peers = Peers(self._engine)
                self._server = _server(host, port, self._answer)
            except (OSError, KVStoreError) as error:
                log.warning("no transfer engine at %s: %s", local_hostname, error)
                self._close()
                return FAILED
        return OK

    def initialize_ext(self, local_hostname: Text, metadata_server: Text, protocol: Text, device_name: Text, metadata_type: Text, /) -> int:
        """As `initialize`."""
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """0 before `initialize`."""
        return 0 if self._server is None else self._server.port

    def get_engine(self) -> Self:
        """The engine itself: stores and process groups that are given it do without it."""
        return self

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._server = self._peers = None

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self._close()

    # --- memory ---

    def register_memory(self, buffer_addr: Number, capacity: Number, location: Text = ANYWHERE) -> int:
        """Show memory to peers, which may read and write it until `unregister_memory`. -7: a part of it is registered already."""
        try:
            memory = Memory(buffer_addr, capacity).view()
            with self._lock:
                if any(
                    address < buffer_addr + capacity and buffer_addr < address + one.size_bytes for address, one in self._regions.items()
                ):
                    return OVERLAPPED
                self._regions[buffer_addr] = self._opened().register(memory)
        except KVStoreError as error:
            return failed(error)
        return OK

    def unregister_memory(self, buffer_addr: Number, /) -> int:
        """-3: the address is not that of registered memory."""
        with self._lock:
            region = self._regions.pop(buffer_addr, None)
        if region is None:
            return NOT_REGISTERED
        try:
            region.close()
        except KVStoreError as error:
            return failed(error)
        return OK

    def batch_register_memory(self, buffer_addresses: Numbers, capacities: Numbers, location: Text = ANYWHERE) -> int:
        """Return the first code that is no success."""
        if len(buffer_addresses) != len(capacities):
            return FAILED
        codes = [self.register_memory(address, size) for address, size in zip(buffer_addresses, capacities, strict=True)]
        return next((code for code in codes if code), OK)

    def batch_unregister_memory(self, buffer_addresses: Numbers, /) -> int:
        """Return the first code that is no success."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), OK)

    def allocate_managed_buffer(self, length: Number, /) -> int:
        """Return the address of fresh, registered memory; 0 if there is none."""
        try:
            region = self._opened().allocate(length)
        except KVStoreError as error:
            failed(error)
            return 0
        with self._lock:
            self._regions[region.address] = self._managed[region.address] = region
        return region.address

    def free_managed_buffer(self, buffer_addr: Number, length: Number, /) -> int:
        with self._lock:
            self._managed.pop(buffer_addr, None)
        return self.unregister_memory(buffer_addr)

    def write_bytes_to_buffer(self, dest_address: Number, src_ptr: Text, length: Number, /) -> int:
        """Copy bytes to an address of this process."""
        data = encoded(src_ptr)
        if length > len(data):
            return FAILED
        ctypes.memmove(dest_address, data, length)
        return OK

    def read_bytes_from_buffer(self, source_address: Number, length: Number, /) -> bytes:
        return ctypes.string_at(source_address, length)

    # --- for the calls that move bytes ---

    def _answer(self) -> bytes:
        engine = self._opened()
        with self._lock:
            regions = dict(self._regions)
        segments = [Segment(address, one.size_bytes, engine.export(one, writable=True)) for address, one in regions.items()]
        return Answer(engine.describe(), segments).packed()

    def _opened(self) -> Engine:
        """Raises Closed."""
        if self._engine is None:
            raise Closed("this transfer engine has not been initialized")
        return self._engine

    def _opened_peers(self) -> Peers:
        self._opened()
        assert self._peers is not None
        return self._peers


def _host_and_port(name: str) -> tuple[str, int]:
    host, colon, port = name.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):
        return name.strip("[]"), 0
    return host.strip("[]"), int(port)


def _server(host: str, port: int, answer: Any) -> HandshakeServer:
    """At the port, or at any if another socket has it."""
    try:
        return HandshakeServer(host, port, answer)
    except OSError:
        if not port:
            raise
        return HandshakeServer(host, 0, answer)


def failed(error: KVStoreError) -> int:
    log.warning("%s", error)
    return FAILED
