"""Messages with which a recorder fetches the events of its tenant's blocks from a node."""

from typing import Final

from kvstore.protocol.message import U32, U64, CountedU8s, Keys, Message, Parents, U32s, U64s, message

STORED: Final = 1
"""A client wrote blocks that are new at this node."""
READ: Final = 2
"""A client read blocks: the hits of one ReadBlocks."""
REMOVED: Final = 3
"""Blocks left this node: evicted, deleted, or lost with a damaged copy."""
MAX_ANSWER_EVENTS: Final = 4096
"""Blocks in one EventBatch, unless its first event alone has more: building them takes 3 ms of the node's loop."""


@message
class FetchEvents(Message):
    """Fetch the events of this tenant's blocks at this node, from `cursor` on (0: from now on).

    Answer: EventBatch, at once.

    The first request starts recording for the tenant; recording stops when the last connection that sent one closes.
    The answer has at most `max_events` blocks, but at least those of the first event.
    """

    TYPE = 52
    cursor: U64
    max_events: U32 = MAX_ANSWER_EVENTS


@message
class EventBatch(Message):
    """Events in order: kind, node's wall clock, number of blocks; then key, size and parent (b"" for none) of each
    event's blocks.

    `next_cursor` goes into the next FetchEvents. `lost`: blocks whose events are missing, because they were overwritten
    before the request, or because local reads overflowed the access ring.
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
