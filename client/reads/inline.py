"""Values that come with a node's answer: read into their rooms, and verified a slice at a time. Sans-I/O: see effects.py."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import xxhash

from kvstore.client.effects import Fill, Operation, work
from kvstore.client.reads.answer import Answer
from kvstore.client.reads.progress import Progress
from kvstore.client.reads.slices import in_slices
from kvstore.protocol.errors import ChecksumMismatch
from kvstore.protocol.node_messages import INLINE


def take_inline(answer: Answer, progress: Progress[Any]) -> Operation[None]:
    """All of them, whatever becomes of each: the channel is in step afterwards. Raises Unavailable, DeadlineExceeded: it is not."""
    blocks, node_id = answer.blocks, answer.node.node_id
    places = answer.places(INLINE)
    found = [progress.room(answer.wanted[place][0], blocks.sizes[place]) for place in places]
    # A value that has no room is read all the same: the rest of the batch comes after it.
    rooms = [(memoryview(bytearray(blocks.sizes[place])),) if room is None else room for room, place in zip(found, places, strict=True)]
    digests = [xxhash.xxh3_64() for _ in places]
    for parts in in_slices(rooms):
        yield Fill(answer.loan.channel, [part for _, part in parts], answer.deadline)
        yield from work(partial(_hash, digests, parts), sum(len(part) for _, part in parts))
    good: list[int] = []
    damaged: list[int] = []
    for place, room, digest in zip(places, found, digests, strict=True):
        if room is not None:
            (good if digest.intdigest() == blocks.checksums[place] else damaged).append(place)
    progress.arrived(answer, good)
    if damaged:
        error = ChecksumMismatch(f"node {node_id} sent a value whose xxh3_64 is not the one recorded")
        progress.retry_damaged(node_id, answer.items(damaged), error)


def _hash(digests: "Sequence[xxhash.xxh3_64]", parts: Sequence[tuple[int, memoryview]]) -> None:
    for index, part in parts:
        digests[index].update(part)
