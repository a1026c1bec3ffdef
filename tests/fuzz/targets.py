"""Fuzz targets: functions of bytes that return or catch a typed error. Any other exception is a finding.

If a checksum guards the bytes, the target computes the right one: otherwise no input would pass the check.
"""

import hmac
import io
import json
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from kvstore.engines.kv_events.events import read_batch
from kvstore.handover import description as handover
from kvstore.kvcache.codecs.tensor_value import HEADER_BYTES as HEADER_VALUE_BYTES
from kvstore.kvcache.codecs.tensor_value import MAGIC, TensorHeader
from kvstore.kvcache.traces.event_file import HEADER, read_events
from kvstore.kvcache.traces.kv_events import read_prompts
from kvstore.kvcache.traces.mooncake import parse_request
from kvstore.master.catalogs.segments import form
from kvstore.master.directory import records
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.frames import HEADER_BYTES, unpack_header
from kvstore.protocol.messages import MESSAGES
from kvstore.security.tickets.ticket import Keyring
from kvstore.store.block_table.rows import BlockRows
from kvstore.store.block_table.tags import from_recovered, tag_of
from kvstore.tiers.tier import Recovered, Slot
from kvstore.tiers.value_codec import decode_into
from kvstore.transfer.description import unpack_engine, unpack_region
from kvstore.transfer.topology.json_form import as_json, dump_topology, parse_topology
from tests.fuzz import control_plane

Target = Callable[[bytes], None]

_KINDS: Final = sorted(MESSAGES)
_DIGESTED_BYTES: Final = HEADER_VALUE_BYTES - 8
_SECRET: Final = bytes(32)
_SCRATCH: Final = Path(tempfile.gettempdir()) / f"kvstore-fuzz-{os.getpid()}"


def header(data: bytes) -> None:
    """A frame's header, of which a session has always read all."""
    unpack_header(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))


def message(data: bytes) -> None:
    """The body of a message of the kind that the first byte chooses: what is read is written and read again alike."""
    kind = MESSAGES[_KINDS[data[0] % len(_KINDS)]] if data else MESSAGES[_KINDS[0]]
    found = kind.unpack(data[1:])
    packed = found.pack()
    if kind.unpack(packed).pack() != packed:
        raise AssertionError(f"{kind.__name__} is written otherwise once it was read")


def segment(data: bytes) -> None:
    """Decode a segment of the catalog behind its checksum. A readable segment can be merged."""
    found = form.decode(xxhash.xxh3_64_intdigest(data).to_bytes(8, "little") + data, b"s/1")
    blocks: form.Blocks = {}
    form.replay(blocks, found.changes)
    again: form.Blocks = {}
    form.replay(again, form.decode(form.encode(blocks), b"s/1").changes)
    if {tenant: rows for tenant, rows in blocks.items() if rows} != again:
        raise AssertionError("a segment is not what it was once it is written anew")


def record(data: bytes) -> None:
    """A small record of the catalog: the length of its key, the key, and its value."""
    key, value = _split(data)
    records.decode(key, value)


def tag(data: bytes) -> None:
    """Decode the tag that NVMe stores with a block."""
    rows = BlockRows()
    block = from_recovered(Recovered(Slot(1, 1, 4096), 7, data), rows)
    if from_recovered(Recovered(Slot(1, 1, block.size_bytes), 7, tag_of(block)), rows).key != block.key:
        raise AssertionError("a block has another key once it was restarted")


def engine(data: bytes) -> None:
    """Decode a transfer engine's description."""
    unpack_engine(data)


def region(data: bytes) -> None:
    """Decode a peer's description of a memory region."""
    unpack_region(data)


def topology(data: bytes) -> None:
    """Parse a host's topology, from a node or an operator's file. Writing and reading it again gives the same topology."""
    found = parse_topology(data)
    if as_json(parse_topology(dump_topology(found))) != as_json(found):
        raise AssertionError("a topology is another one once it was written")


def rank(data: bytes) -> None:
    """Decode a rank's description in a hand-over."""
    handover.unpack(data)


def trace(data: bytes) -> None:
    """A line of a trace."""
    parse_request(data)


def recording(data: bytes) -> None:
    """The lines of a recording of a store's events, read as such and as the prompts that they make."""
    _SCRATCH.write_bytes(json.dumps(HEADER).encode() + b"\n" + data)
    try:
        for _event in read_events(_SCRATCH):
            pass
        for _prompt in read_prompts(_SCRATCH):
            pass
    finally:
        _SCRATCH.unlink()


def value_header(data: bytes) -> None:
    """The header of a tensor value behind its digest, and the value itself."""
    head = (MAGIC + data).ljust(HEADER_VALUE_BYTES, b"\0")[:_DIGESTED_BYTES]
    whole = head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little") + data[_DIGESTED_BYTES - len(MAGIC) :]
    found = TensorHeader.unpack(whole)
    if found is not None and TensorHeader.unpack(found.pack()) != found:
        raise AssertionError("a header is another one once it was written")
    decode_into(whole, memoryview(bytearray(4096)))


def control(data: bytes) -> None:
    """A call of a master's control plane: which, and its request."""
    control_plane.call(data)


def ticket(data: bytes) -> None:
    """Check a ticket that a client sends a node, with a valid seal: the seal alone makes no field trusted."""
    body = data[:1] + struct.pack("<I", 1) + data[5:]
    keyring = Keyring()
    keyring.add(1, _SECRET, age_ms=0, issuer="m", now_ns=0)
    keyring.check(body + hmac.digest(_SECRET, body, "sha256"), node_id=1, now_ns=0)


def kv_events(data: bytes) -> None:
    """Decode KV events that an engine publishes."""
    read_batch(data)


def _split(data: bytes) -> tuple[bytes, bytes]:
    stream = io.BytesIO(data)
    length = stream.read(1)
    return stream.read(length[0] if length else 0), stream.read()


TARGETS: Final[dict[str, Target]] = {
    function.__name__: function
    for function in (
        header,
        message,
        segment,
        record,
        tag,
        engine,
        region,
        topology,
        rank,
        trace,
        recording,
        value_header,
        kv_events,
        control,
        ticket,
    )
}


def check(target: Target, data: bytes) -> None:
    """Raises what is a finding; a typed error is none."""
    with suppress(KVStoreError):
        target(data)
