"""Layout of a writer's page: shared memory in which a node offers a local client the slot of its next put.

The page belongs to one connection and ends with it. All words are 64 bits wide, in the host's byte order, and aligned.

    MAGIC, number, slab, offset, size    written by the node: the slot ahead; number 0: none
    slabs ahead, SLABS_AHEAD words       written by the node: slab + 1 of slabs of later slots, to be mapped, or 0
    writing                              written by the client: the number of the slot that it writes, 0 for none

The two numbers exclude each other as the flags of Dekker's algorithm. The client stores `writing`, fences, and reads
`number` again before it writes the slot. The node stores number 0, fences, and reads `writing` before it reuses the
slot. So a withdrawn slot is never written, even by a client that was stopped in between.
"""

from typing import Final

PAGE_BYTES: Final = 4096
PAGE_MAGIC: Final = 0x31_45_47_41_50_56_4B_53
"""Changes with the layout."""
AT_PAGE_MAGIC, AT_NUMBER, AT_SLAB, AT_OFFSET, AT_SIZE, AT_SLABS_AHEAD = range(6)
SLABS_AHEAD: Final = 2
AT_WRITING: Final = 16
"""On its own cache line, because another process writes it."""
MAX_SLOT_AHEAD_BYTES: Final = 16 << 20
"""Largest slot ahead: beyond it the saved round trip is negligible beside the copy."""
