"""Tests of inventory_comparison.py: digests describe the inventory, and differing blocks are reported once each."""

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest

from kvstore.protocol.catalog_messages import Digests
from kvstore.protocol.digests import MAX_RUN, as_numbers, numbers
from kvstore.protocol.errors import KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.block import Block
from kvstore.store.replication import inventory_comparison as comparison
from kvstore.store.replication.inventory_comparison import InventoryComparison
from kvstore.tiers.tier import Slot
from tests.store.made import made

Answer = Callable[[Flags | KVStoreError], None]


def block(generation: int, *, nvme: bool = False) -> Block:
    found = made("red", b"%d" % generation, 100 + generation, generation, checksum=7 * generation)
    found.set_slot(2 if nvme else 1, Slot(1, 1, 100 + generation))
    return found


class Compared:
    """A comparison with a master that answers on the test's command."""

    def __init__(self, *parts: list[Block], max_blocks: int = 10_000) -> None:
        self.turns: list[Callable[[], None]] = []
        self.sent: list[Digests] = []
        self.answers: list[Answer] = []
        self.told: list[list[Block] | KVStoreError | None] = []
        self.comparison = InventoryComparison(
            iter(parts), epoch=3, send=self.send, soon=self.turns.append, then=self.told.append, max_blocks=max_blocks
        )

    def send(self, message: Digests, answered: Answer) -> None:
        self.sent.append(Digests.unpack(message.pack()))
        self.answers.append(answered)

    def run(self) -> None:
        while self.turns:
            self.turns.pop(0)()


def test_digest_runs_have_generation_count_sum_and_tiers() -> None:
    blocks = [block(2), block(1), block(4, nvme=True), block(3)]
    found = Compared(blocks)
    assert not found.sent
    found.run()
    (message,) = found.sent
    assert (message.epoch, message.has_more, list(message.first_generations), message.counts, message.tiers) == (
        3,
        0,
        [1, 4],
        b"\3\1",
        b"\2\4",
    )
    columns = as_numbers([1, 2, 3]), as_numbers([7, 14, 21]), as_numbers([101, 102, 103])
    assert message.sums[0] == int(numbers(message.seed, *columns).sum(dtype=np.uint64))
    found.answers[0](Flags(b"\0\1"))
    assert found.told == [[blocks[0], blocks[1], blocks[3]]]


def test_large_inventories_are_compared_in_several_messages() -> None:
    blocks = [block(at) for at in range(1, 5 * MAX_RUN + 1)]
    with patch.object(comparison, "RUNS_PER_MESSAGE", 2):
        found = Compared(blocks[:10], [], *(blocks[begin : begin + 10] for begin in range(10, len(blocks), 10)))
        found.turns.pop(0)()
        assert len(found.turns) == 1
        while not found.sent:
            found.turns.pop(0)()
        assert len(found.turns) == 1
        found.run()
        assert [(message.has_more, len(message.first_generations)) for message in found.sent] == [(1, 2), (1, 2), (0, 1)]
        assert len({message.seed for message in found.sent}) == 1
        found.answers[1](Flags(b"\1\0"))
        found.answers[0](Flags(b"\1\1"))
        assert not found.told
        found.answers[2](Flags(b"\0"))
        assert found.told == [blocks[3 * MAX_RUN :]]


@pytest.mark.parametrize("reply", [Unavailable("the catalog is away"), Flags(b"\1\1\1")])
def test_a_failed_reply_ends_the_comparison_once(reply: Flags | KVStoreError) -> None:
    with patch.object(comparison, "RUNS_PER_MESSAGE", 1):
        found = Compared([block(1), block(2, nvme=True)])
        found.run()
        found.answers[0](reply)
        found.answers[1](Flags(b"\1"))
    (error,) = found.told
    assert isinstance(error, type(reply) if isinstance(reply, KVStoreError) else ProtocolError)


@pytest.mark.parametrize("step", ["_read", "_order_all", "_digests", "_differing"])
def test_a_failed_comparison_step_ends_the_comparison(step: str) -> None:
    """For any exception, such as MemoryError: the inventory would never end."""
    with patch.object(comparison, "RUNS_PER_MESSAGE", 1), patch.object(InventoryComparison, step, side_effect=MemoryError):
        found = Compared([block(1)], [block(2, nvme=True)])
        found.run()
        for answered in found.answers:
            answered(Flags(b"\0"))
    assert found.told == [None]


def test_an_ended_comparison_does_nothing() -> None:
    unread, unsent, unanswered = Compared([block(1)]), Compared([block(1), block(2, nvme=True)]), Compared([block(1)])
    unread.comparison.end()
    unread.run()
    assert not unread.sent

    def send_and_end(message: Digests, answered: Answer) -> None:
        unsent.sent.append(message)
        unsent.comparison.end()

    unsent.comparison._send = send_and_end
    with patch.object(comparison, "RUNS_PER_MESSAGE", 1):
        unsent.run()
    assert len(unsent.sent) == 1

    unanswered.run()
    unanswered.comparison.end()
    unanswered.answers[0](Flags(b"\0"))
    assert not unanswered.told
