"""`mooncake.engine` over kvstore's transfer engine: reads and writes memory of other processes by address.

Peers must be kvstore's, too: Mooncake's wire protocols are not implemented. Calls return Mooncake's codes and raise
TypeError for arguments of other types.
"""

import ctypes
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final, Self

from kvstore.client.memory import Memory, view_of
from kvstore.engines.mooncake.arguments import Number, Numbers, Text, arguments_converted, encoded, instance_of, optional
from kvstore.engines.mooncake.peers import HandshakeReply, HandshakeServer, KnownPeer, Peers, RegisteredSegment
from kvstore.protocol.errors import Closed, InvalidArgument, KVStoreError
from kvstore.transfer.engine import TransferEngine as Engine
from kvstore.transfer.memory.region import Region
from kvstore.transfer.paths.transfers import Transfer

log = logging.getLogger("kvstore.engines.mooncake")

OK: Final = 0
FAILED: Final = -1
NOT_REGISTERED: Final = -3
OVERLAPPED: Final = -7
NO_PEER: Final = -102
DEADLINE_S: Final = 30.0
MIN_DEADLINE_S: Final = 5.0
TIMEOUT: Final = "MC_TRANSFER_TIMEOUT"
PENDING, COMPLETED = 0, 1
BYTES_PER_S: Final = 1 << 30
"""A transfer's deadline grows by its bytes at this rate."""

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
]
SUPPORT_CUDA = SUPPORT_EFA = SUPPORT_HIP = SUPPORT_INTRA_NVLINK = SUPPORT_MNNVL = SUPPORT_MUSA = False


class TransferOpcode(IntEnum):
    """Direction of a transfer, from the caller's side."""

    Read = 0
    Write = 1


Read, Write = TransferOpcode


@dataclass(slots=True)
class TransferNotify:
    """Notification that a peer receives after a transfer."""

    name: str = ""
    msg: str = ""


Opcode = Annotated[TransferOpcode, instance_of(TransferOpcode)]
Notify = Annotated[TransferNotify | None, optional(instance_of(TransferNotify))]


@arguments_converted
class TransferEngine:
    """Transfer engine with a name, and its registered memory. Call `initialize` first. Threads may share it."""

    def __init__(self) -> None:
        given = os.environ.get(TIMEOUT, "")
        self._deadline_s = max(MIN_DEADLINE_S, float(given)) if given.isdigit() else DEADLINE_S
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._server: HandshakeServer | None = None
        self._peers: Peers | None = None
        self._regions: dict[int, Region] = {}
        """By address, in order of registration."""
        self._batches: dict[int, Transfer] = {}
        self._numbers = itertools.count(1)

    def initialize(self, local_hostname: Text, metadata_server: Text, protocol: Text, device_name: Text, /) -> int:
        """Open the engine under the name `local_hostname`, HOST or HOST:PORT. Peers reach it at HOST and
        `get_rpc_port`, which is PORT if that is free.

        Metadata server, protocol and device are ignored: names are addresses, and `KVSTORE_TRANSFER_*` selects
        transports. Returns 0, or -1: the address is not one of this host, or the engine is already open.
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
        """Same as `initialize`."""
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """Return the port; 0 before `initialize`."""
        return 0 if self._server is None else self._server.port

    def get_engine(self) -> Self:
        """Return this object; stores and process groups accept it and do not use it."""
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

    def register_memory(self, buffer_addr: Number, capacity: Number, location: Text = "*") -> int:
        """Let peers read and write memory until `unregister_memory`. Returns -7 if it overlaps registered memory."""
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
        """Returns -3 if the address is not that of registered memory."""
        with self._lock:
            region = self._regions.pop(buffer_addr, None)
        if region is None:
            return NOT_REGISTERED
        try:
            region.close()
        except KVStoreError as error:
            return failed(error)
        return OK

    def batch_register_memory(self, buffer_addresses: Numbers, capacities: Numbers, location: Text = "*") -> int:
        """Return the first error code, or 0."""
        if len(buffer_addresses) != len(capacities):
            return FAILED
        codes = [self.register_memory(address, size) for address, size in zip(buffer_addresses, capacities, strict=True)]
        return next((code for code in codes if code), OK)

    def batch_unregister_memory(self, buffer_addresses: Numbers, /) -> int:
        """Return the first error code, or 0."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), OK)

    def allocate_managed_buffer(self, length: Number, /) -> int:
        """Return the address of new, registered memory; 0 if there is none."""
        try:
            region = self._opened().allocate(length)
        except KVStoreError as error:
            failed(error)
            return 0
        with self._lock:
            self._regions[region.address] = region
        return region.address

    def free_managed_buffer(self, buffer_addr: Number, length: Number, /) -> int:
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

    # --- transfers ---

    def transfer_sync_write(
        self, target_hostname: Text, buffer: Number, peer_buffer_address: Number, length: Number, transport_hint: Text = ""
    ) -> int:
        """Return 0, or -1: the peer is unreachable, or the memory is not registered there."""
        return self._finished(target_hostname, [buffer], [peer_buffer_address], [length], Write)

    def transfer_sync_read(
        self, target_hostname: Text, buffer: Number, peer_buffer_address: Number, length: Number, transport_hint: Text = ""
    ) -> int:
        return self._finished(target_hostname, [buffer], [peer_buffer_address], [length], Read)

    def transfer_sync(
        self,
        target_hostname: Text,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        opcode: Opcode,
        notify: Notify = None,
        transport_hint: Text = "",
    ) -> int:
        """Transfer and wait. The peer receives `notify` after the bytes."""
        return self._finished(target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify)

    def batch_transfer_sync_write(
        self, target_hostname: Text, buffers: Numbers, peer_buffer_addresses: Numbers, lengths: Numbers, transport_hint: Text = ""
    ) -> int:
        return self._finished(target_hostname, buffers, peer_buffer_addresses, lengths, Write)

    def batch_transfer_sync_read(
        self, target_hostname: Text, buffers: Numbers, peer_buffer_addresses: Numbers, lengths: Numbers, transport_hint: Text = ""
    ) -> int:
        return self._finished(target_hostname, buffers, peer_buffer_addresses, lengths, Read)

    def batch_transfer_sync(
        self,
        target_hostname: Text,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        opcode: Opcode,
        notify: Notify = None,
        transport_hint: Text = "",
    ) -> int:
        return self._finished(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)

    def batch_transfer_async_write(
        self, target_hostname: Text, buffers: Numbers, peer_buffer_addresses: Numbers, lengths: Numbers, transport_hint: Text = ""
    ) -> int:
        """Start a batch; return its number for `get_batch_transfer_status`, 0 if it did not start."""
        return self._begun(target_hostname, buffers, peer_buffer_addresses, lengths, Write)

    def batch_transfer_async_read(
        self, target_hostname: Text, buffers: Numbers, peer_buffer_addresses: Numbers, lengths: Numbers, transport_hint: Text = ""
    ) -> int:
        return self._begun(target_hostname, buffers, peer_buffer_addresses, lengths, Read)

    def batch_transfer_async(
        self,
        target_hostname: Text,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        opcode: Opcode,
        transport_hint: Text = "",
    ) -> int:
        return self._begun(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def transfer_submit_write(
        self, target_hostname: Text, buffer: Number, peer_buffer_address: Number, length: Number, transport_hint: Text = ""
    ) -> int:
        """Start a transfer; return its number for `transfer_check_status`, 0 if it did not start."""
        return self._begun(target_hostname, [buffer], [peer_buffer_address], [length], Write)

    def transfer_check_status(self, batch_id: Number, /) -> int:
        """Return 1: complete, 0: pending, -1: failed or unknown. A finished number is forgotten."""
        with self._lock:
            transfer = self._batches.get(batch_id)
            if transfer is not None and not transfer.is_over:
                return PENDING
            self._batches.pop(batch_id, None)
        return COMPLETED if transfer is not None and transfer.error is None else FAILED

    def get_batch_transfer_status(self, batch_ids: Numbers, /) -> int:
        """Wait for batches. Return 0, or -1: one of them failed, or is unknown."""
        with self._lock:
            batches = [self._batches.pop(number, None) for number in batch_ids]
        failed = [transfer for transfer in batches if transfer is None or not _waited(transfer)]
        return FAILED if failed else OK

    def _finished(
        self,
        name: str,
        buffers: Sequence[int],
        remote: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> int:
        try:
            transfer, known = self._submitted(name, buffers, remote, lengths, opcode)
            transfer.wait()
            if notify is not None:
                self._opened().notify(known.peer, json.dumps([notify.name, notify.msg]).encode(), deadline_s=self._deadline_s)
        except KVStoreError as error:
            self._forget(name)
            return failed(error)
        return OK

    def _begun(self, name: str, buffers: Sequence[int], remote: Sequence[int], lengths: Sequence[int], opcode: TransferOpcode) -> int:
        try:
            transfer, _ = self._submitted(name, buffers, remote, lengths, opcode)
        except KVStoreError as error:
            self._forget(name)
            failed(error)
            return 0
        with self._lock:
            number = next(self._numbers)
            self._batches[number] = transfer
        return number

    def _submitted(
        self, name: str, buffers: Sequence[int], remote: Sequence[int], lengths: Sequence[int], opcode: TransferOpcode
    ) -> tuple[Transfer, KnownPeer]:
        """Start a transfer. Raises InvalidArgument, Unreachable and other errors of the transfer engine."""
        if not len(buffers) == len(remote) == len(lengths):
            raise InvalidArgument(f"{len(buffers)} buffers, {len(remote)} addresses, {len(lengths)} lengths: pass equally many")
        rows = list(zip([Memory(*row) for row in zip(buffers, lengths, strict=True)], remote, strict=True))
        peers = self._opened_peers()
        try:
            known = peers.known(name)
            spans = [known.span(address, memory.size_bytes) for memory, address in rows]
        except InvalidArgument:  # the peer may have registered the memory after the last handshake
            known = peers.refreshed(name)
            spans = [known.span(address, memory.size_bytes) for memory, address in rows]
        here = [view_of(memory.pointer, memory.size_bytes) for memory, _ in rows]
        pairs = zip(here, spans, strict=True) if opcode is Write else zip(spans, here, strict=True)
        batch = [(source, destination, size) for (source, destination), size in zip(pairs, lengths, strict=True) if size]
        return self._opened().submit(batch, deadline_s=self._deadline_s + sum(lengths) / BYTES_PER_S), known

    # --- peers ---

    def get_notifies(self) -> list[TransferNotify]:
        """Return the notifications received since the last call."""
        try:
            return [TransferNotify(*json.loads(message)) for _, message in self._opened().notifications()]
        except KVStoreError as error:
            failed(error)
            return []

    def send_probe(self, peer_server_name: Text) -> int:
        """Return 0 if the peer replies to a handshake, else -102."""
        try:
            self._opened_peers().refreshed(peer_server_name)
        except KVStoreError as error:
            failed(error)
            return NO_PEER
        return OK

    def get_local_topology(self, device_name: Text = "") -> str:
        """Return JSON of this host's memory locations, each with its preferred and all available rails."""
        matrix = self._engine.topology.matrix if self._engine is not None else {}
        return json.dumps({place: [list(rails.preferred), list(rails.available)] for place, rails in matrix.items()})

    def warmup_efa_segment(self, segment_name: Text) -> int:
        """Return 0: nothing needs to be warmed up."""
        return OK

    def get_first_buffer_address(self, segment_name: Text, /) -> int:
        """Return the address of the first memory that the peer registered; 0 without memory or without the peer."""
        try:
            return self._opened_peers().refreshed(segment_name).first_address
        except KVStoreError as error:
            failed(error)
            return 0

    def _answer(self) -> bytes:
        engine = self._opened()
        with self._lock:
            regions = dict(self._regions)
        segments = [RegisteredSegment(address, one.size_bytes, engine.export(one, writable=True)) for address, one in regions.items()]
        return HandshakeReply(engine.describe(), segments).packed()

    def _opened(self) -> Engine:
        """Return the transfer engine. Raises Closed."""
        if self._engine is None:
            raise Closed("this transfer engine is not initialized: call initialize")
        return self._engine

    def _opened_peers(self) -> Peers:
        self._opened()
        assert self._peers is not None
        return self._peers

    def _forget(self, name: str) -> None:
        if self._peers is not None:
            self._peers.forget(name)


setattr(TransferEngine, "TransferOpcode", TransferOpcode)  # noqa: B010 a name that is a type in annotations of the class


def _waited(transfer: Transfer) -> bool:
    """Wait for the transfer; return whether it succeeded."""
    try:
        transfer.wait()
    except KVStoreError as error:
        failed(error)
        return False
    return True


def _host_and_port(name: str) -> tuple[str, int]:
    host, colon, port = name.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):
        return name.strip("[]"), 0
    return host.strip("[]"), int(port)


def _server(host: str, port: int, answer: Callable[[], bytes]) -> HandshakeServer:
    """Listen at the port, or at any if that is in use."""
    try:
        return HandshakeServer(host, port, answer)
    except OSError:
        if not port:
            raise
        return HandshakeServer(host, 0, answer)


def failed(error: KVStoreError) -> int:
    log.warning("%s", error)
    return FAILED
