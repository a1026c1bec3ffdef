"""What a recorder asks a node: what happened to the blocks of its tenant since it asked last. Not on the path of any value."""

from typing import Final

from kvstore.protocol.message import U32, U64, CountedU8s, Keys, Message, Parents, U32s, U64s, message

STORED: Final = 1
"""Written by a client: blocks that are new at this node."""
READ: Final = 2
"""Given to a client: the blocks of one Read that were there."""
REMOVED: Final = 3
"""Not at this node any more: evicted, deleted, or lost with a damaged copy."""
MAX_ANSWER_EVENTS: Final = 4096
"""Blocks in one EventBatch, unless its first event alone has more: putting them together takes 3 ms of the node's loop."""


@message
class FetchEvents(Message):
    """What happened to this tenant's blocks at this node, from `cursor` on (0: from now on)? Answer: EventBatch, at once.

    The first one has the node record for the tenant, the end of the last connection that asked ends it. At most `max_events` blocks are
    told, the first event's in any case.
    """

    TYPE = 52
    cursor: U64
    max_events: U32 = MAX_ANSWER_EVENTS


@message
class EventBatch(Message):
    """Events in order: kind, wall clock of the node, number of blocks; then key, size and parent (b"" none) of each event's blocks.

    `next_cursor` is for the next Events. `lost` blocks' events are not told: they were overwritten before they were asked
    for, or more was read in shared memory than was noted there.
    """

    TYPE = 53
    next_cursor: U64
    lost: U64
    kinds: CountedU8s
    times_us: U64s
    blocks: U32s
    keys: Keys
    sizes: U64s
    parents: Parents
