"""Tags of durable copies: the metadata from which a block is restored after a restart."""

from typing import Final

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.wire import Reader, Writer
from kvstore.store.block_table.block import NVME, Block, Loss
from kvstore.store.block_table.rows import BlockRows
from kvstore.tiers.tier import Recovered, Slot
from kvstore.tiers.value_codec import Encoding

TAG_VERSION: Final = 1
_LOSSLESS, _LOSSY = 0, 1
"""A lossy copy's tag ends with its Loss."""


def tag_of(block: Block, loss: Loss | None = None) -> bytes:
    """Encode the tag of a block's copy, at most 1,151 bytes; `from_recovered` decodes it."""
    writer = Writer().u8(TAG_VERSION).u8(_LOSSLESS if loss is None else _LOSSY).u64(block.generation).text(block.tenant)
    writer.blob(block.key).text(block.namespace).blob(block.parent)
    if loss is not None:
        payload_bytes, elements = loss.encoding[1:] if loss.encoding is not None else (0, 0)
        writer.u64(block.size_bytes).u64(block.checksum).u64(loss.checksum).u64(payload_bytes).u64(elements)
    return writer.done()


def from_recovered(found: Recovered, rows: BlockRows) -> Block:
    """Return the block of a recovered value, made by `rows`. Raises ProtocolError for an invalid tag."""
    reader = Reader(found.tag)
    if (version := reader.u8()) != TAG_VERSION:
        raise ProtocolError(f"stored block has tag version {version}; this release reads version {TAG_VERSION}")
    is_lossy = reader.u8() == _LOSSY
    generation, tenant, key, namespace, parent = reader.u64(), reader.text(), reader.blob(), reader.text(), reader.blob()
    size_bytes, checksum, loss = found.slot.size_bytes, found.checksum, None
    if is_lossy:
        size_bytes, checksum, loss = _read_loss(reader, found.slot)
    reader.end()
    block = rows.make(tenant, key, size_bytes, generation, namespace, parent, checksum)
    block.set_slot(NVME, found.slot)
    if loss is not None:
        block.set_loss(NVME, loss)
    return block


def _read_loss(reader: Reader, slot: Slot) -> tuple[int, int, Loss]:
    """Return size and checksum of the value that was put, and the Loss. Raises ProtocolError if they do not match the
    slot."""
    size_bytes, checksum, lossy_checksum = reader.u64(), reader.u64(), reader.u64()
    payload_bytes, elements = reader.u64(), reader.u64()
    if (slot.size_bytes < size_bytes) != (elements > 0) or slot.size_bytes > size_bytes:
        raise ProtocolError(f"stored block of {size_bytes} bytes has a slot of {slot.size_bytes} bytes and {elements} encoded elements")
    return size_bytes, checksum, Loss(lossy_checksum, Encoding(slot.size_bytes, payload_bytes, elements) if elements else None)
