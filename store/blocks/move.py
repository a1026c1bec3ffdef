"""A copy of a block between two tiers of one node, as it is planned (room.py) and the mover makes it (store/moves/mover.py)."""

from dataclasses import dataclass

from kvstore.store.blocks.block import Block
from kvstore.tiers.tier import Slot
from kvstore.tiers.value_codec import Encoding


@dataclass(slots=True, eq=False)
class TierMove:
    """A planned copy of `block` from one tier to another; `block.moving` is set until `BlockTable.finish_move`.

    `encoding` is what the copy will be, where `slot` has room for the encoded value only.
    """

    block: Block
    source: int
    target: int
    slot: Slot
    encoding: Encoding | None = None
