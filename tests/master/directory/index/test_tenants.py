"""Tests of tenants.py; a state machine holds it against a dictionary."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory.index.tenants import Pending, PendingBatch, PendingCommits
from kvstore.master.directory.records import Version

KEYS = [b"%d" % number for number in range(8)]


def batch_of(keys: list[bytes], ticket: int = 1) -> PendingBatch:
    count, numbers = len(keys), range(1, len(keys) + 1)
    texts = ("ns",) * count, [b"parent"] * count
    puts = BlockPuts("red", keys, numbers, range(11, 11 + count), range(21, 21 + count), *texts, ((7,),) * count)
    return PendingBatch(ticket, 7, puts, bytes(numbers))


def test_a_block_of_a_batch_is_what_its_columns_say() -> None:
    pending, batch = PendingCommits(), batch_of([b"a", b"b"], ticket=3)
    pending.add_all(batch)
    assert pending[b"b"] == (Pending(3, 7, Version(2, 12, 22, "ns", b"parent"), 2),)
    assert (b"a" in pending, b"c" in pending, pending[b"c"]) == (True, False, ())
    assert pending.has_any([b"c", b"a"])
    assert not pending.has_any([b"c"])
    assert pending.take_all(batch)
    assert len(pending) == 0
    assert not pending.has_any([b"a"])


class AgainstADictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pending = PendingCommits()
        self.known: dict[bytes, tuple[Pending, ...]] = {}
        self.batches: list[PendingBatch] = []
        self.ticket = 0

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1))
    def add_all(self, keys: list[bytes]) -> None:
        self.ticket += 1
        batch = batch_of([key for key in keys if key not in self.known], self.ticket)
        if batch.puts.keys:
            self.pending.add_all(batch)
            self.batches.append(batch)
            self.known |= {key: (batch.of(key),) for key in batch.puts.keys}

    @rule(key=st.sampled_from(KEYS), count=st.integers(0, 2))
    def change(self, key: bytes, count: int) -> None:
        self.ticket += 1
        waiting = tuple(Pending(self.ticket, number, Version(1, 2, 3, "", b""), 2) for number in range(count))
        self.pending[key] = waiting
        self.known.pop(key, None)
        if waiting:
            self.known[key] = waiting

    @rule(data=st.data())
    def take_all(self, data: st.DataObject) -> None:
        if self.batches:
            batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
            is_whole = all(self.known.get(key) == (batch.of(key),) for key in batch.puts.keys)
            assert self.pending.take_all(batch) == is_whole
            if is_whole:
                for key in batch.puts.keys:
                    del self.known[key]

    @invariant()
    def agree(self) -> None:
        assert dict(self.pending.items()) == self.known
        assert len(self.pending) == len(self.known)
        assert [self.pending[key] for key in KEYS] == [self.known.get(key, ()) for key in KEYS]
        assert self.pending.has_any(KEYS) == bool(self.known)


TestAgainstADictionary = AgainstADictionary.TestCase
