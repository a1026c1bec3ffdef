"""`mooncake.engine` over kvstore's transfer engine: memory of other processes is read and written by its address.

Peers are kvstore's, too: the protocols of Mooncake's transports are not spoken. Calls return Mooncake's codes and raise TypeError for
arguments of other types.
"""

import itertools
import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any, Final

from kvstore.client.memory import Memory, view_of
from kvstore.engines.mooncake.arguments import Number, Numbers, Text, arguments_converted
from kvstore.engines.mooncake.engine_memory import FAILED, OK, EngineMemory, failed
from kvstore.engines.mooncake.peers import KnownPeer
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.transfer.paths.transfers import Transfer

NO_PEER: Final = -102
PENDING, COMPLETED = 0, 1
BYTES_PER_S: Final = 1 << 30
"""A transfer has its deadline and the time that its bytes take at this rate."""

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


class TransferNotify:
    """Notification that a peer receives after a transfer."""

    __slots__ = ("msg", "name")

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name = name
        self.msg = msg


def _opcode(value: Any) -> TransferOpcode:
    if not isinstance(value, TransferOpcode):
        raise TypeError(f"{value!r:.50} is no TransferOpcode")
    return value


def _notify(value: Any) -> TransferNotify | None:
    if value is not None and not isinstance(value, TransferNotify):
        raise TypeError(f"{value!r:.50} is no TransferNotify")
    return value


Opcode = Annotated[TransferOpcode, _opcode]
Notify = Annotated[TransferNotify | None, _notify]


@arguments_converted
class TransferEngine(EngineMemory):
    """One engine of this process. `initialize` first. Threads may share it."""

    def __init__(self) -> None:
        super().__init__()
        self._batches: dict[int, Transfer] = {}
        self._numbers = itertools.count(1)

    # --- transfers ---

    def transfer_sync_write(
        self, target_hostname: Text, buffer: Number, peer_buffer_address: Number, length: Number, transport_hint: Text = ""
    ) -> int:
        """Return 0, or -1: the peer is not reachable, or the memory not registered there."""
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
        """The peer receives `notify` once the bytes are there."""
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
        """Return the number of a batch under way, for `get_batch_transfer_status`; 0: it did not begin."""
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
        """Return the number of a transfer under way, for `transfer_check_status`; 0: it did not begin."""
        return self._begun(target_hostname, [buffer], [peer_buffer_address], [length], Write)

    def transfer_check_status(self, batch_id: Number, /) -> int:
        """Return 1: it is over, 0: under way, -1: it failed, or is unknown. A number counts once."""
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
        """Raises InvalidArgument, Unreachable and other errors of the transfer engine."""
        if not len(buffers) == len(remote) == len(lengths):
            raise InvalidArgument(f"{len(buffers)} buffers, {len(remote)} addresses and {len(lengths)} lengths are not as many")
        rows = list(zip([Memory(*row) for row in zip(buffers, lengths, strict=True)], remote, strict=True))
        peers = self._opened_peers()
        try:
            known = peers.known(name)
            spans = [known.span(address, memory.size_bytes) for memory, address in rows]
        except InvalidArgument:  # of memory that the peer has registered since it was asked
            known = peers.asked(name)
            spans = [known.span(address, memory.size_bytes) for memory, address in rows]
        here = [view_of(memory.pointer, memory.size_bytes) for memory, _ in rows]
        pairs = zip(here, spans, strict=True) if opcode is Write else zip(spans, here, strict=True)
        batch = [(source, destination, size) for (source, destination), size in zip(pairs, lengths, strict=True) if size]
        return self._opened().submit(batch, deadline_s=self._deadline_s + sum(lengths) / BYTES_PER_S), known

    # --- peers ---

    def get_notifies(self) -> list[TransferNotify]:
        """Return the notifications that have come since the last call."""
        try:
            return [TransferNotify(*json.loads(message)) for _, message in self._opened().notifications()]
        except KVStoreError as error:
            failed(error)
            return []

    def send_probe(self, peer_server_name: Text) -> int:
        """Return 0 if the peer answers a handshake, else -102."""
        try:
            self._opened_peers().asked(peer_server_name)
        except KVStoreError as error:
            failed(error)
            return NO_PEER
        return OK

    def get_local_topology(self, device_name: Text = "") -> str:
        """Return JSON of the memory of this host: by its location the preferred rails and the others."""
        matrix = self._engine.topology.matrix if self._engine is not None else {}
        return json.dumps({place: [list(rails.preferred), list(rails.available)] for place, rails in matrix.items()})

    def warmup_efa_segment(self, segment_name: Text) -> int:
        """0: nothing is to be warmed up."""
        return OK

    def get_first_buffer_address(self, segment_name: Text, /) -> int:
        """Return the address of the peer's memory that was registered first; 0 without any, or without the peer."""
        try:
            return self._opened_peers().asked(segment_name).first_address
        except KVStoreError as error:
            failed(error)
            return 0

    def _forget(self, name: str) -> None:
        if self._peers is not None:
            self._peers.forget(name)


setattr(TransferEngine, "TransferOpcode", TransferOpcode)  # noqa: B010 a name that is a type in annotations of the class


def _waited(transfer: Transfer) -> bool:
    """Whether it is over without an error."""
    try:
        transfer.wait()
    except KVStoreError as error:
        failed(error)
        return False
    return True
