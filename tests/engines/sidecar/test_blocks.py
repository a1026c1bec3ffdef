"""Promises of blocks.py: the master converges to the engine's blocks, even if reports are lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.engines.kv_events.events import CPU, AllBlocksCleared, BlocksRemoved, BlocksStored, Event
from kvstore.engines.sidecar import blocks as module
from kvstore.engines.sidecar.blocks import EngineBlocks
from kvstore.kvcache.key_names import NamespaceNaming
from kvstore.kvcache.namespace import Namespace
from kvstore.master.scheduling.engine_caches import EngineCaches
from kvstore.protocol import control_pb2 as pb

NAMING = NamespaceNaming(Namespace(model="m", dtype="float32", block_tokens=2))
TOKENS = list(range(20))
KEYS = NAMING.block_keys(TOKENS)


def stored(start: int, stop: int, *, is_plain: bool = True, block_tokens: int = 2) -> BlocksStored:
    """Blocks [start, stop) of the one prompt; the engine calls block i 100 + i."""
    return BlocksStored(
        [100 + index for index in range(start, stop)],
        100 + start - 1 if start else None,
        TOKENS[2 * start : 2 * stop],
        block_tokens,
        is_plain,
    )


class Told:
    """An engine's blocks, and a master that hears what gets through."""

    def __init__(self) -> None:
        self.blocks = EngineBlocks(NAMING, tenant="t")
        self.master = EngineCaches(max_blocks=1000)

    def report(self, *, arrives: bool = True, is_answered: bool = True) -> None:
        change = self.blocks.change()
        if arrives and change is not None:
            message = pb.EngineCache(
                tenant=change.tenant,
                version=change.version,
                base_version=change.base_version,
                key_bytes=16,
                added=b"".join(change.added),
                removed=b"".join(change.removed),
            )
            self.master.apply("e", message)
        if arrives and is_answered:
            self.blocks.acknowledged(self.master.version("e"))

    def run(self) -> int:
        return self.master.match("t", KEYS, ["e"])[0]


def test_blocks_get_token_keys_and_reach_the_master() -> None:
    told = Told()
    told.report()
    assert told.run() == 0
    told.blocks.apply([stored(0, 3), stored(3, 5)])
    assert len(told.blocks) == 5
    told.report()
    assert told.run() == 5
    told.blocks.apply([BlocksRemoved([103, 999])])
    told.report()
    assert told.run() == 3
    assert told.blocks.change() is None, "nothing is new"
    told.report()
    assert told.run() == 3


@pytest.mark.parametrize("event", [stored(1, 3), stored(0, 3, is_plain=False), stored(0, 1, block_tokens=4)])
def test_blocks_that_cannot_be_named_are_passed_over(event: BlocksStored) -> None:
    told = Told()
    told.blocks.apply([event])
    assert len(told.blocks) == 0


def test_the_same_change_goes_out_until_it_is_answered() -> None:
    told = Told()
    told.blocks.apply([stored(0, 3)])
    first = told.blocks.change()
    told.blocks.apply([stored(3, 5)])
    assert told.blocks.change() == first
    told.report(is_answered=False)
    told.report()
    assert told.run() == 3
    told.report()
    assert told.run() == 5


def test_more_than_a_report_takes_goes_out_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHANGED_BLOCKS", 2)
    told = Told()
    told.blocks.apply([stored(0, 5)])
    runs = []
    for _ in range(4):
        told.report()
        runs.append(told.run())
    assert runs == [2, 4, 5, 5]


class Machine(RuleBasedStateMachine):
    """An engine that stores and drops blocks, a way to the master that loses reports and answers, and a master that forgets all."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self.held: set[int] = set()

    @rule(start=st.integers(0, 9), count=st.integers(1, 10))
    def store(self, start: int, count: int) -> None:
        stop = min(10, start + count)
        self._apply(stored(start, stop))
        if not start or start - 1 in self.held:
            self.held |= set(range(start, stop))

    @rule(gone=st.sets(st.integers(0, 9)))
    def drop(self, gone: set[int]) -> None:
        self._apply(BlocksRemoved([100 + index for index in gone]))
        self.held -= gone

    @rule()
    def clear(self) -> None:
        self._apply(AllBlocksCleared())
        self.held.clear()

    @rule(arrives=st.booleans(), is_answered=st.booleans())
    def report(self, arrives: bool, is_answered: bool) -> None:
        self.told.report(arrives=arrives, is_answered=is_answered)

    @rule()
    def forget(self) -> None:
        self.told.master = EngineCaches(max_blocks=1000)

    @rule()
    def agree(self) -> None:
        for _ in range(3):
            self.told.report()
        assert self.told.run() == next(index for index in range(11) if index not in self.held)

    @invariant()
    def holds(self) -> None:
        assert len(self.told.blocks) == len(self.held)

    def _apply(self, event: Event) -> None:
        self.told.blocks.apply([event])


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_lower_media_are_passed_over() -> None:
    """The scheduler prefers an engine for its own memory alone."""
    told = Told()
    copied = stored(0, 2)
    told.blocks.apply([BlocksStored(copied.hashes, None, copied.token_ids, 2, True, medium=CPU)])
    told.report()
    assert told.run() == 0
    told.blocks.apply([stored(0, 2), BlocksRemoved([100, 101], CPU)])
    told.report()
    assert told.run() == 2
