"""Promises of policy_states.py: the states of a group's keys are those of a dict, whatever other groups keep in the same column."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.policy_states import BlockStates
from kvstore.store.blocks.rows import BlockRows
from kvstore.tiers.policies.interface import DictStates
from kvstore.tiers.tier import Slot

OURS, THEIRS = 3, 4


class Visible:
    """A table's visible blocks, and the states of two groups of theirs."""

    def __init__(self) -> None:
        self._rows = BlockRows()
        self.blocks: dict[bytes, Block] = {}
        columns = self._rows.make("red", b"any", 1, 1).columns
        self.ours, self.theirs = BlockStates(OURS, self.blocks, columns), BlockStates(THEIRS, self.blocks, columns)

    def add(self, *keys: bytes, group: int = OURS) -> None:
        slots = [Slot(number, 1, 1, group) for number in range(len(keys))]
        made = self._rows.make_all("red", keys, 1, [1] * len(keys), "", [b""] * len(keys), slots)
        self.blocks.update(zip(keys, made, strict=True))


def test_a_key_that_has_no_state_is_not_there() -> None:
    visible = Visible()
    visible.add(b"a")
    states = visible.ours
    for key in (b"a", b"unknown"):
        assert key not in states
        assert states.get(key) is None
        with pytest.raises(KeyError):
            states[key]
    assert len(states) == 0
    assert states.are_new([b"a", b"unknown"])


def test_a_state_is_its_groups_own() -> None:
    visible = Visible()
    visible.add(b"a")
    visible.add(b"b", group=THEIRS)
    visible.ours[b"a"], visible.theirs[b"b"] = "our", "their"
    assert (visible.ours.get(b"a"), visible.ours.get(b"b")) == ("our", None)
    assert (visible.theirs.get(b"a"), visible.theirs.get(b"b")) == (None, "their")
    assert (list(visible.ours.items()), list(visible.theirs.items())) == ([(b"a", "our")], [(b"b", "their")])


def test_a_scan_passes_by_so_many_blocks_of_whichever_group() -> None:
    visible = Visible()
    visible.add(*(b"%d" % number for number in range(10)), group=THEIRS)
    visible.add(b"a", b"b")
    visible.ours.set_all([b"a", b"b"], 1)
    visible.ours[b"of no block"] = 2
    assert list(visible.ours.scan(11)) == [(b"a", 1), (b"of no block", 2)]
    assert list(visible.ours.items()) == [(b"a", 1), (b"b", 1), (b"of no block", 2)]


KEYS = st.sampled_from([b"key %d" % number for number in range(8)])


class AsADict(RuleBasedStateMachine):
    """Keys come and go as a table has them: visible before they have a state, and until they have none; or never."""

    def __init__(self) -> None:
        super().__init__()
        self.visible = Visible()
        self.states, self.expected = self.visible.ours, DictStates[bytes, int]()
        self.number = 0

    @precondition(lambda self: len(self.visible.blocks) < 8)
    @rule(key=KEYS, is_ours=st.booleans())
    def put(self, key: bytes, is_ours: bool) -> None:
        """A block of the group gets its state then, and one of another group that one's."""
        if key in self.visible.blocks:
            return
        self.visible.add(key, group=OURS if is_ours else THEIRS)
        if is_ours:
            self.write(key)
        elif key not in self.expected:
            self.visible.theirs[key] = -1

    @rule(keys=st.lists(KEYS, unique=True))
    def put_all(self, keys: list[bytes]) -> None:
        new = [key for key in keys if key not in self.visible.blocks and key not in self.expected]
        self.visible.add(*new) if new else None
        assert self.states.are_new(new)
        self.number += 1
        self.states.set_all(new, self.number)
        self.expected.set_all(new, self.number)

    @rule(key=KEYS)
    def write(self, key: bytes) -> None:
        """Also of keys without a visible block; not of those of another group."""
        block = self.visible.blocks.get(key)
        if block is not None and block.columns.groups[block] != OURS and key not in self.expected:
            return
        self.number += 1
        self.states[key] = self.expected[key] = self.number

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        if key in self.expected:
            del self.states[key], self.expected[key]
        elif key in self.visible.theirs:
            del self.visible.theirs[key]
        self.visible.blocks.pop(key, None)

    @invariant()
    def are_alike(self) -> None:
        keys = [b"key %d" % number for number in range(8)]
        assert [self.states.get(key) for key in keys] == [self.expected.get(key) for key in keys]
        assert [key in self.states for key in keys] == [key in self.expected for key in keys]
        assert dict(self.states.items()) == self.expected
        assert len(self.states) == len(self.expected)
        blocks = self.visible.blocks
        ours = [key for key in keys if key in blocks and blocks[key].columns.groups[blocks[key]] == OURS]
        in_column = [key for key in ours if key not in self.states._others]
        assert list(self.states.found(in_column)) == [self.expected.get(key) for key in in_column]
        assert self.states.are_new([key for key in ours if key not in self.expected])
        assert all(not self.states.are_new([key]) for key in self.expected)


TestAsADict = AsADict.TestCase
