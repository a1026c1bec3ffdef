"""One copy between tiers under way: where it comes from, its bytes once they are there, what is written, or why nothing is."""

import logging
from collections.abc import Sequence

from kvstore.store.blocks.columns import Loss
from kvstore.store.blocks.move import TierMove
from kvstore.store.blocks.tags import tag_of
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Buffer, Record, Slot, Tier
from kvstore.tiers.value_codec import ValueCodec

log = logging.getLogger("kvstore.store")


class MoveJob:
    """Made in the node's loop, used in the mover's thread and looked at again in the loop once it is over."""

    __slots__ = ("checksum", "damage", "data", "is_refused", "loss", "lossy_checksum", "move", "source")

    def __init__(self, move: TierMove, source: Slot, tier: Tier) -> None:
        block = move.block
        self.move = move
        self.source = source
        self.damage: Exception | None = None
        self.is_refused = False
        """The value cannot be encoded, or not without losing more than it has lost before."""
        self.data: Buffer = tier.view(source) if isinstance(tier, DramTier) else b""
        self.loss = block.loss_of_copy(move.source)
        self.checksum = block.checksum_in(move.source)
        self.lossy_checksum = block.lossy_checksum()

    def encode(self, codec: ValueCodec) -> None:
        """Put the encoded value in place of the value. All lossy copies of a block give the same bytes: else a reader's second read would
        not be like its first, and each way down might cost some more."""
        try:
            encoded = codec.encode(memoryview(self.data))
        except Exception:
            log.exception("a value could not be encoded; it is stored as it is")
            encoded = None
        if encoded is None or self.lossy_checksum not in (None, encoded.decoded_checksum):
            self.is_refused = True
            return
        self.data, self.checksum = encoded.data, encoded.checksum
        self.loss = Loss(encoded.decoded_checksum, self.move.encoding)

    @property
    def is_good(self) -> bool:
        return self.damage is None and not self.is_refused

    def record(self) -> Record:
        return Record(self.move.slot, self.data, self.checksum, tag_of(self.move.block, self.loss))


def fetch(tier: Tier, jobs: Sequence[MoveJob]) -> None:
    """Read the sources that cannot be looked at in place."""
    if isinstance(tier, DramTier):
        return
    destinations = [memoryview(bytearray(job.source.size_bytes)) for job in jobs]
    answers = tier.read_batch_into([job.source for job in jobs], destinations)
    for job, destination, answer in zip(jobs, destinations, answers, strict=True):
        job.data, job.damage = destination, answer
