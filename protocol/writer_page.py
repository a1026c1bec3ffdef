"""Form of the page of shared memory in which a node offers a writer of its host the slot of its next put.

The page belongs to one connection and ends with it. All words are 64 bits wide, in the host's byte order, and aligned.

    MAGIC, number, slab, offset, size    written by the node: the slot that is opened ahead; number 0: there is none
    slabs ahead, SLABS_AHEAD words       written by the node: slab + 1 of slabs that later slots will be in, to be mapped meanwhile, or 0
    writing                              written by the client: the number of the slot that it writes, 0 for none

The two numbers are one another's flag, as in Dekker's algorithm. The client stores `writing`, fences, and reads `number` again before it
writes the slot. The node stores number 0, fences, and reads `writing` before it gives the slot to another put. So a slot that the node took
back is never written, however long its writer was stopped before.
"""

from typing import Final

PAGE_BYTES: Final = 4096
PAGE_MAGIC: Final = 0x31_45_47_41_50_56_4B_53
"""Changes with the form."""
AT_PAGE_MAGIC, AT_NUMBER, AT_SLAB, AT_OFFSET, AT_SIZE, AT_SLABS_AHEAD = range(6)
SLABS_AHEAD: Final = 2
AT_WRITING: Final = 16
"""In a cache line of its own, as another process writes it."""
MAX_SLOT_AHEAD_BYTES: Final = 16 << 20
"""Largest slot that is opened ahead: beyond it a round trip is little beside the copy."""
