"""Tests of inventory_comparison.py: a node that names only what differs leaves the directory as one that names everything."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.master.directory.index import inventory_comparison as comparison
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.writes.record_policy import ALL, OUTLIVING
from kvstore.protocol.catalog_messages import PHASE_SYNC, PHASE_SYNC_BEGIN, PHASE_SYNC_END, DeleteBlocks, Digests
from kvstore.protocol.digests import as_numbers, numbers, starts
from kvstore.protocol.errors import InvalidArgument, StaleEpoch
from tests.master.blocks import DRAM, NVME, TENANT, Event, Master

SEED = 11


def digests(epoch: int, events: Sequence[Event], *, runs_a_message: int = 1000) -> list[Digests]:
    """Of events by ascending generation."""
    tiers = np.array([event.tiers for event in events], np.uint8)
    ends = [*starts(tiers).tolist(), len(events)]
    runs = [events[begin:end] for begin, end in pairwise(ends)]
    made = []
    for at in range(0, max(len(runs), 1), runs_a_message):
        part = runs[at : at + runs_a_message]
        sums = [
            int(
                numbers(
                    SEED,
                    as_numbers([event.generation for event in run]),
                    as_numbers([event.checksum for event in run]),
                    as_numbers([event.size for event in run]),
                ).sum(dtype=np.uint64)
            )
            for run in part
        ]
        is_last = at + runs_a_message >= len(runs)
        counts, masks = bytes(len(run) for run in part), bytes(run[0].tiers for run in part)
        made.append(Digests(epoch, SEED, int(not is_last), [run[0].generation for run in part], counts, sums, masks))
    return made


def flags_of(master: Master, node: NodeMember, messages: Sequence[Digests]) -> list[int]:
    found = master.directory.compare(node.node_id, node.epoch)
    assert [found.take(message) for message in messages] == [False] * (len(messages) - 1) + [True]
    for ops in found.steps():
        master.commit(ops)
    assert [len(flags) for flags in found.flags()] == [len(message.first_generations) for message in messages]
    flags = list(b"".join(found.flags()))
    told = list(b"".join(message.counts for message in messages))
    assert found.blocks == sum(count for count, flag in zip(told, flags, strict=True) if flag)
    master.directory.check_integrity()
    return flags


def compared(master: Master, node: NodeMember, *events: Event) -> tuple[int, list[DeleteBlocks]]:
    """An inventory of which only what differs is named: how many blocks were, and what is to be dropped."""
    events = tuple(sorted(events, key=lambda event: event.generation))
    master.publish(node, phase=PHASE_SYNC_BEGIN)
    messages = digests(node.epoch, events, runs_a_message=2)
    flags = flags_of(master, node, messages)
    counts = list(b"".join(message.counts for message in messages))
    is_same = [flag for flag, count in zip(flags, counts, strict=True) for _ in range(count)]
    named = [event for event, same in zip(events, is_same, strict=True) if not same]
    commands = [*master.publish(node, *named, phase=PHASE_SYNC), *master.publish(node, phase=PHASE_SYNC_END)]
    return len(named), [command for _node_id, command in commands if isinstance(command, DeleteBlocks)]


def events(count: int, *, first: int = 1, tiers: int = DRAM) -> list[Event]:
    return [Event(b"%d" % at, at, tiers=tiers) for at in range(first, first + count)]


def known(*held: Event, recorded: str = ALL) -> tuple[Master, NodeMember]:
    """A master that knew a node to have these, and the node as it has registered again."""
    master = Master(recorded=recorded)
    master.sync(master.register("a"), *held)
    return master, master.register("a")


def state(master: Master) -> dict[bytes, object]:
    rows, tenants = master.directory.columns()
    return {key: (rows.version(row), rows.pairs(row)) for tenant in tenants for key, row in tenant.rows.items() if rows.pairs(row)}


def test_of_an_inventory_that_is_known_nothing_is_named() -> None:
    held = [*events(40), *events(40, first=41, tiers=NVME)]
    master, node = known(*held)
    assert node.known_blocks == 80
    assert compared(master, node, *held) == (0, [])
    assert master.exists(*(event.key for event in held)) == [1] * 80
    assert master.directory.members.named("a") is node
    assert node.is_settled


def test_of_a_difference_the_run_is_named_and_the_others_are_not() -> None:
    held = events(100)
    master, node = known(*held)
    named, _drops = compared(master, node, *held[:40], *held[41:], Event(b"new", 101))
    assert named == 31 + 5
    assert master.exists(b"new", held[40].key, held[39].key) == [1, 0, 1]


def test_unacknowledged_removal_is_named_and_dropped() -> None:
    held = events(40)
    master, node = known(*held)
    master.sync(node, *held)
    away = master.register("b")
    assert not away.is_settled
    removal = master.directory.removing.plan(TENANT, [b"7", b"none"], force=False)
    master.commit(removal.ops)
    node = master.register("a")
    named, drops = compared(master, node, *held)
    assert named == 32
    assert [drop.keys for drop in drops] == [[b"7"]]


def test_what_goes_while_it_is_compared_is_not_taken_as_named() -> None:
    held = events(40)
    master, node = known(*held)
    master.publish(node, phase=PHASE_SYNC_BEGIN)
    found = master.directory.compare(node.node_id, node.epoch)
    for message in digests(node.epoch, held):
        found.take(message)
    steps = found.steps()
    next(steps)
    next(steps)
    assert master.remove(b"7") == [1]
    list(steps)
    assert found.flags() == [b"\1\1"]
    assert found.blocks == 39
    assert master.exists(b"7", b"8") == [0, 1]
    master.directory.check_integrity()


@pytest.mark.parametrize("slices", range(8))
def test_failed_comparison_confirms_nothing(slices: int) -> None:
    """Nothing but what is named outlives the inventory: no run may be called the same whose blocks have not been taken as named."""
    held = events(40)
    master, node = known(*held)
    master.publish(node, phase=PHASE_SYNC_BEGIN)
    found = master.directory.compare(node.node_id, node.epoch)
    (message,) = digests(node.epoch, held)
    found.take(message)
    confirm, left = found._confirm, iter(range(slices))
    with (
        patch.object(comparison, "SLICE_ROWS", 5),
        patch.object(found, "_confirm", lambda begin: confirm(begin) if next(left, None) is not None else 1 // 0),
        pytest.raises(ZeroDivisionError),
    ):
        list(found.steps())
    assert found.flags() == [b"\0\0"]
    master.publish(node, *held, phase=PHASE_SYNC)
    master.publish(node, phase=PHASE_SYNC_END)
    assert master.exists(*(event.key for event in held)) == [1] * 40
    master.directory.check_integrity()


@pytest.mark.promise("resync")
@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([DRAM, NVME, DRAM | NVME])), unique_by=lambda one: one[0], max_size=60),
    st.sets(st.integers(1, 60)),
    st.lists(st.tuples(st.integers(100, 160), st.integers(1, 60)), unique_by=(lambda one: one[0], lambda one: one[1]), max_size=5),
    st.sets(st.integers(1, 60), max_size=3),
    st.sets(st.integers(1, 60), max_size=3),
    st.sampled_from([ALL, OUTLIVING]),
    st.booleans(),
)
@settings(max_examples=60)
def test_the_directory_ends_as_with_a_whole_inventory(
    before: list[tuple[int, int]],
    lost: set[int],
    newer: list[tuple[int, int]],
    moved: set[int],
    removed: set[int],
    recorded: str,
    is_restarted: bool,
) -> None:
    """For any blocks that the node lost, replaced or moved, and any removals, while it was disconnected."""
    ends, named = [], []
    for way in ("whole", "compared"):
        master = Master(recorded=recorded)
        held = {b"%d" % at: Event(b"%d" % at, at, tiers=tiers) for at, tiers in before}
        node, other = master.register("a"), master.register("b")
        master.sync(node, *held.values())
        master.sync(other, *(event for event in held.values() if event.generation % 7 == 0))
        master.directory.disconnected(node.node_id, node.epoch, 1)
        master.remove(*(b"%d" % at for at in sorted(removed)))
        if is_restarted:
            master = master.restart()
            other = master.register("b", 2)
        for at in lost:
            held.pop(b"%d" % at, None)
        for generation, at in newer:
            held[b"%d" % at] = Event(b"%d" % at, generation)
        held |= {key: replace(event, tiers=NVME) for key, event in held.items() if int(key) in moved}
        node = master.register("a")
        with patch.object(comparison, "SLICE_ROWS", 5):
            if way == "whole":
                master.sync(node, *held.values())
                named.append(len(held))
            else:
                named.append(compared(master, node, *held.values())[0] if 2 * node.known_blocks >= len(held) else len(held))
                if named[-1] == len(held):
                    master.sync(node, *held.values())
        ends.append(state(master))
    assert ends[0] == ends[1]
    assert named[1] <= named[0]


def test_digests_that_are_none_are_refused_and_change_nothing() -> None:
    master, node = known(*events(4))
    with pytest.raises(InvalidArgument, match="has not begun"):
        master.directory.compare(other_synced(master).node_id, master.directory.members.named("b").epoch)  # type: ignore[union-attr]
    master.publish(node, phase=PHASE_SYNC_BEGIN)
    with pytest.raises(StaleEpoch):
        master.directory.compare(node.node_id, node.epoch + 1)
    good = Digests(node.epoch, SEED, 1, [1, 2], b"\1\1", [5, 6], b"\2\2")
    for bad, why in (
        (Digests(node.epoch, SEED, 1, list(range(3, 10)), b"\1" * 7, [5] * 7, b"\2" * 7), "at most 8"),
        (replace(good, first_generations=[], counts=b"", sums=[], tiers=b""), "has no runs"),
        (replace(good, first_generations=[2, 3]), "ascending"),
        (replace(good, first_generations=[4, 3]), "ascending"),
        (replace(good, first_generations=[3, 4], seed=12), "one seed"),
        (replace(good, first_generations=[3, 4], counts=b"\0\1"), "a run has no blocks"),
        (replace(good, first_generations=[3, 4], tiers=b"\0\1"), "tiers"),
        (replace(good, first_generations=[3, 4], tiers=b"\1\10"), "tiers"),
    ):
        found = master.directory.compare(node.node_id, node.epoch)
        assert not found.take(good)
        with pytest.raises(InvalidArgument, match=why):
            found.take(bad)


def other_synced(master: Master) -> NodeMember:
    node = master.register("b")
    master.sync(node)
    return node


def test_as_many_blocks_of_which_one_is_another_are_not_the_same() -> None:
    one, two, three, four = events(4)
    master, node = known(one, two, four)
    named, _drops = compared(master, node, one, three, four)
    assert named == 3
    assert master.exists(b"1", b"2", b"3", b"4") == [1, 0, 1, 1]
