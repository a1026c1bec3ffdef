"""Values that come with a node's answer: read into their rooms and verified. Sans-I/O: see effects.py."""

from typing import Any

from kvstore.client.buffers import checksum
from kvstore.client.effects import Fill, Operation, work
from kvstore.client.reads.answer import Answer
from kvstore.client.reads.progress import Progress
from kvstore.protocol.errors import ChecksumMismatch
from kvstore.protocol.node_messages import INLINE


def take_inline(answer: Answer, progress: Progress[Any]) -> Operation[None]:
    """All of them, whatever becomes of each: the channel is in step afterwards. Raises Unavailable, DeadlineExceeded: it is not."""
    blocks, node_id = answer.blocks, answer.node.node_id
    places = answer.places(INLINE)
    views = [progress.room(answer.wanted[place][0], blocks.sizes[place]) for place in places]
    # A value that has no room is read all the same: the rest of the batch comes after it.
    yield Fill(
        answer.loan.channel,
        [memoryview(bytearray(blocks.sizes[place])) if view is None else view for view, place in zip(views, places, strict=True)],
        answer.deadline,
    )
    total = sum(blocks.sizes[place] for place in places)
    sums = yield from work(lambda: [None if view is None else checksum(view) for view in views], total)
    good: list[int] = []
    damaged: list[int] = []
    for place, found in zip(places, sums, strict=True):
        if found is not None:
            (good if found == blocks.checksums[place] else damaged).append(place)
    progress.arrived(answer, good)
    if damaged:
        error = ChecksumMismatch(f"node {node_id} sent a value whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node_id, answer.items(damaged), error)
