"""Tests of block_events.py: what is seen, when, and what the catalog ends with, in every order of events."""

from collections.abc import Iterable
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Change
from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.index.key_index import SMALL_BATCH
from kvstore.master.directory.placement import commands
from kvstore.master.directory.writes import block_events as publishing
from kvstore.master.directory.writes.block_events import MAX_GENERATION, MIN_NEW, PublishPlan
from kvstore.protocol.catalog_messages import (
    EVENT_COMMIT,
    EVENT_MOVED,
    EVENT_REMOVED,
    PHASE_STREAM,
    PHASE_SYNC,
    PHASE_SYNC_BEGIN,
    PHASE_SYNC_END,
    DeleteBlocks,
    SetPinned,
)
from kvstore.protocol.errors import InvalidArgument, StaleEpoch
from tests.master.blocks import DRAM, NVME, TENANT, Event, Master, S, one_node, publish, tier_of


def plan(master: Master, epoch: int, *events: Event, node_id: int = 1, phase: int = PHASE_STREAM) -> PublishPlan:
    made = master.directory.plan_publish(node_id, publish(epoch, events, phase))
    master.directory.check_integrity()
    return made


def durable(master: Master, *plans: PublishPlan) -> None:
    for made in plans:
        master.commit(made.ops)
    for made in plans:
        master.commit(master.directory.apply(made).ops)
        master.directory.check_integrity()


def gone(key: bytes, generation: int = 1) -> Event:
    return Event(key, generation, EVENT_REMOVED)


def blocks(master: Master) -> list[BlockPuts]:
    return [record for _key, record in sorted(master.catalog.items()) if isinstance(record, BlockPuts)]


def holders(master: Master, key: bytes) -> list[int]:
    return list(master.directory.queries.lookup(TENANT, [key]).nodes)


@pytest.mark.promise("no-partial-blocks")
def test_a_commit_is_seen_only_once_it_is_durable() -> None:
    master = Master()
    node = master.register("a")
    made = plan(master, node.epoch, Event(b"k", 5))
    assert master.exists(b"k") == [0]
    durable(master, made)
    assert master.exists(b"k") == [1]
    assert [(record.keys, record.holders, record.generations) for record in blocks(master)] == [([b"k"], [(1,)], [5])]


def test_what_is_gone_is_gone_before_the_catalog_knows() -> None:
    master = Master()
    node = master.register("a")
    master.publish(node, Event(b"k"))
    made = plan(master, node.epoch, gone(b"k"))
    assert master.exists(b"k") == [0]
    durable(master, made)
    assert not blocks(master)


def test_eviction_of_an_old_generation_keeps_the_newer() -> None:
    # A node reports an ended put late; by then it may have put the key again.
    master = Master()
    node = master.register("a")
    master.publish(node, Event(b"k", 5))
    durable(master, plan(master, node.epoch, gone(b"k", 4)))
    assert master.exists(b"k") == [1]
    durable(master, plan(master, node.epoch, gone(b"k", 5)))
    assert master.exists(b"k") == [0]


def test_equal_bytes_at_two_nodes_are_replicas() -> None:
    master = Master()
    one, two = master.register("a"), master.register("b")
    durable(master, plan(master, one.epoch, Event(b"k")), plan(master, two.epoch, Event(b"k"), node_id=2))
    assert holders(master, b"k") == [1, 2]
    assert blocks(master)[0].holders == [(1, 2)]
    master.publish(one, gone(b"k"))
    assert holders(master, b"k") == [2]
    assert blocks(master)[0].holders == [(2,)]


def test_higher_generation_wins_and_the_loser_drops() -> None:
    master = Master()
    one, two = master.register("a"), master.register("b")
    master.publish(one, Event(b"k", 5))
    made = plan(master, two.epoch, Event(b"k", 9, checksum=8), node_id=2)
    assert holders(master, b"k") == [1]
    master.commit(made.ops)
    assert master.directory.apply(made).commands.messages() == [(1, DeleteBlocks(1, TENANT, [b"k"], [5], force=1))]
    assert holders(master, b"k") == [2]
    assert [record.holders for record in blocks(master)] == [[(2,)]]
    master.publish(one, gone(b"k", 5))
    assert holders(master, b"k") == [2]


@pytest.mark.promise("failover")
def test_the_lower_generation_is_told_to_drop_at_once() -> None:
    master = Master()
    one, two = master.register("a"), master.register("b")
    master.publish(one, Event(b"k", 9))
    assert master.publish(two, Event(b"k", 5, checksum=8)) == [(2, DeleteBlocks(1, TENANT, [b"k"], [5], force=1))]
    assert holders(master, b"k") == [1]
    assert blocks(master)[0].holders == [(1,)]


def test_pending_version_loses_to_a_higher_visible_one() -> None:
    master = Master()
    one, two = master.register("a"), master.register("b")
    slow = plan(master, one.epoch, Event(b"k", 5, checksum=1))
    fast = plan(master, two.epoch, Event(b"k", 9, checksum=2), node_id=2)
    master.commit([*slow.ops, *fast.ops])
    master.directory.apply(fast)
    effects = master.directory.apply(slow)
    assert effects.commands.messages() == [(1, DeleteBlocks(1, TENANT, [b"k"], [5], force=1))]
    assert holders(master, b"k") == [2]


def test_a_nodes_own_newer_version_replaces_its_older_one() -> None:
    master = Master()
    one, two = master.register("a"), master.register("b")
    master.publish(one, Event(b"k", 5))
    master.publish(two, Event(b"k", 5))
    made = plan(master, one.epoch, Event(b"k", 9, checksum=8))
    assert holders(master, b"k") == [2]
    newest = plan(master, one.epoch, Event(b"k", 10, checksum=9))
    durable(master, made, newest)
    assert holders(master, b"k") == [1]
    assert master.directory.queries.lookup(TENANT, [b"k"]).generations[0] == 10


def test_moved_changes_tiers_in_memory_and_never_the_catalog() -> None:
    master = Master()
    node = master.register("a")
    master.publish(node, Event(b"k"))
    moved = plan(
        master, node.epoch, Event(b"k", 1, EVENT_MOVED, tiers=DRAM | NVME), Event(b"k", 2, EVENT_MOVED), Event(b"x", 1, EVENT_MOVED)
    )
    assert moved.ops == []
    assert master.directory.queries.lookup(TENANT, [b"k"]).tiers == bytes([DRAM | NVME])


def test_moved_while_the_commit_waits_counts() -> None:
    master = Master()
    one, two = master.register("a"), master.register("b")
    first, other = plan(master, one.epoch, Event(b"k")), plan(master, two.epoch, Event(b"k"), node_id=2)
    durable(master, first, other, plan(master, one.epoch, Event(b"k", 1, EVENT_MOVED, tiers=NVME)))
    assert master.directory.queries.lookup(TENANT, [b"k"]).tiers == bytes([NVME, DRAM])
    made, moved = plan(master, one.epoch, Event(b"n")), plan(master, one.epoch, Event(b"n", 1, EVENT_MOVED, tiers=NVME))
    durable(master, made, moved)
    assert master.directory.queries.lookup(TENANT, [b"n"]).tiers == bytes([NVME])


@pytest.mark.promise("failover")
def test_stale_registration_voids_its_pending_commits() -> None:
    master = Master()
    node = master.register("a")
    old = node.epoch
    made = plan(master, old, Event(b"k"))
    master.register("a")
    durable(master, made)
    assert master.exists(b"k") == [0]
    with pytest.raises(StaleEpoch):
        plan(master, old, Event(b"k"))
    assert not blocks(master)


def test_commit_is_void_after_its_node_was_forgotten() -> None:
    master = Master()
    node = master.register("a")
    made = plan(master, node.epoch, Event(b"k"))
    master.directory.disconnected(node.node_id, node.epoch, 0)
    master.directory.run_due(100 * S)
    durable(master, made)
    assert not blocks(master)


def test_after_a_full_inventory_what_was_not_named_is_gone() -> None:
    master = Master()
    node = master.register("a")
    master.publish(node, Event(b"kept"), Event(b"lost"), Event(b"streamed"))
    master.publish(node, Event(b"kept"), phase=PHASE_SYNC_BEGIN)
    assert master.exists(b"kept", b"lost", b"streamed") == [1, 1, 1]
    master.publish(node, Event(b"new"), phase=PHASE_SYNC)
    master.publish(node, Event(b"streamed", 1, EVENT_MOVED, tiers=NVME))
    master.publish(node, phase=PHASE_SYNC_END)
    assert node.state == "alive"
    assert master.exists(b"kept", b"lost", b"streamed", b"new") == [1, 0, 1, 1]
    master.delete_unheld()
    assert [record.keys for record in blocks(master)] == [[b"kept"], [b"new"], [b"streamed"]]


@pytest.mark.promise("restart-keeps-nvme")
def test_new_process_loses_dram_and_keeps_nvme_as_hints() -> None:
    master = Master()
    node = master.register("a", 1)
    master.publish(node, Event(b"dram"), Event(b"nvme", tiers=NVME), Event(b"both", tiers=DRAM | NVME))
    master.directory.disconnected(node.node_id, node.epoch, 0)
    assert master.exists(b"dram", b"nvme", b"both") == [0, 0, 0]
    node = master.register("a", 2)
    assert master.exists(b"dram", b"nvme", b"both") == [0, 1, 1]
    assert master.directory.queries.lookup(TENANT, [b"both"]).tiers == bytes([NVME])
    master.sync(node, Event(b"nvme", tiers=NVME))
    assert master.exists(b"dram", b"nvme", b"both") == [0, 1, 0]


def test_pinned_blocks_are_held_again_when_they_come_back() -> None:
    master = Master()
    node = master.register("a")
    master.publish(node, Event(b"k"), Event(b"other"))
    master.directory.pins.pin(TENANT, [b"k"], pinned=True)
    hold = (1, SetPinned(1, TENANT, [b"k"], 1))
    assert master.sync(master.register("a"), Event(b"k"), Event(b"other")) == [hold]
    other = master.register("b")
    assert master.publish(other, Event(b"k")) == [(2, hold[1])]


def test_pin_ends_with_the_last_replica() -> None:
    master = Master()
    one, two = master.register("a"), master.register("b")
    master.publish(one, Event(b"k"))
    master.publish(two, Event(b"k"))
    master.commit(master.directory.pins.pin(TENANT, [b"k"], pinned=True).ops)
    master.publish(one, gone(b"k"))
    assert master.directory.counts().pinned == 1
    master.publish(two, gone(b"k"))
    assert master.directory.counts().pinned == 0
    assert [key for key in master.catalog if key.startswith(b"p")] == []


def test_a_commit_ends_the_reservation_it_answers() -> None:
    master = Master()
    node = master.register("a")
    grants = master.directory.reserve(TENANT, [b"k", b"other"], [1, 1], now_ns=0)
    master.publish(node, Event(b"k", grants.generations[0]), Event(b"other", 3))
    assert master.directory.counts().reserved == 1


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [("tenant_indexes", [1], "tenant index of 1"), ("namespace_indexes", [3], "namespace index of 3"), ("kinds", b"\x09", "kind 9")]
    + [("generations", [MAX_GENERATION + 1], "no master can have granted")],
)
def test_a_message_that_makes_no_sense_is_refused_whole(field: str, value: object, what: str) -> None:
    master = Master()
    node = master.register("a")
    message = publish(node.epoch, [Event(b"k", kind=EVENT_COMMIT)])
    setattr(message, field, value)
    with pytest.raises(InvalidArgument, match=what):
        master.directory.plan_publish(node.node_id, message)
    message = publish(node.epoch, [Event(b"k", tenant="x" * 129)])
    with pytest.raises(InvalidArgument, match="128"):
        master.directory.plan_publish(node.node_id, message)
    assert master.directory.counts().blocks == 0
    assert master.register("b", 1, tier_of()).node_id == 2


def test_generations_that_a_node_makes_up_leave_some_to_grant() -> None:
    master = Master()
    node = master.register("a")
    with pytest.raises(InvalidArgument):
        master.publish(node, Event(b"k", (1 << 64) - 1))
    master.publish(node, Event(b"k", MAX_GENERATION))
    for one in (master, master.restart()):
        one.register("a")
        one.commit(one.directory.grants_ahead())
        [granted] = one.directory.reserve(TENANT, [b"new"], [1], now_ns=0).generations
        assert granted > MAX_GENERATION
    with pytest.raises(InvalidArgument):
        master.publish(node, Event(b"k", granted + 1))
    master.publish(node, Event(b"new", granted))


def test_holders_that_cannot_be_asked_are_taken_off() -> None:
    master = Master()
    one, two = master.register("a"), master.register("b")
    master.publish(one, Event(b"k"))
    master.publish(two, Event(b"k"))
    master.directory.disconnected(1, one.epoch, 0)
    master.commit(master.directory.removing.plan(TENANT, [b"k", b"none"], force=False).ops)
    assert blocks(master)[0].holders == [(2,)]


def test_more_pins_than_a_message_are_all_sent_again() -> None:
    master = Master()
    node = master.register("a")
    events = [Event(b"%d" % number, 1) for number in range(10)]
    master.publish(node, *events)
    master.directory.pins.pin(TENANT, [event.key for event in events], pinned=True)
    node = master.register("a")
    master.publish(node, phase=PHASE_SYNC_BEGIN)
    master.publish(node, *events, phase=PHASE_SYNC)
    with patch.object(publishing, "MAX_BATCH", 4), patch.object(commands, "MAX_BATCH", 4):
        held = [message for _node_id, message in master.publish(node, phase=PHASE_SYNC_END)]
    assert [len(message.keys) for message in held] == [4, 4, 2]
    assert [key for message in held for key in message.keys] == [event.key for event in events]


def test_version_removed_during_absence_is_dropped() -> None:
    master = Master()
    node = master.register("a")
    master.directory._tenants.of(TENANT).removed[b"k"] = 5
    made = master.directory.plan_publish(node.node_id, publish(node.epoch, [Event(b"k", 5)]))
    assert (made.ops, made.commits) == ([], [])
    assert made.commands.messages() == [(node.node_id, DeleteBlocks(1, TENANT, [b"k"], [5], force=1))]
    made = master.directory.plan_publish(node.node_id, publish(node.epoch, [Event(b"k", 6)]))
    assert len(made.commits) == 1


def test_node_keeps_only_listed_blocks_up_to_its_horizon() -> None:
    master = Master()
    node, other = master.register("a"), master.register("b")
    master.publish(node, Event(b"listed", 3, tiers=NVME), Event(b"elsewhere", 3), Event(b"replaced", 3))
    master.publish(other, Event(b"elsewhere", 3), Event(b"replaced", 4))
    master.directory.disconnected(node.node_id, node.epoch, 0)
    master.remove(b"elsewhere")
    master.publish(other, Event(b"elsewhere", 3))
    node = master.register("a", instance=2)
    node.removal_horizon = 5
    had = [Event(key, 3, tiers=NVME) for key in (b"listed", b"elsewhere", b"replaced", b"unknown")]
    commands = master.sync(node, *had, Event(b"new", 6))
    assert commands == [(node.node_id, DeleteBlocks(1, TENANT, [b"elsewhere", b"replaced", b"unknown"], [3, 3, 3], force=1))]
    assert master.exists(b"listed", b"unknown", b"new") == [1, 0, 1]


def test_put_reserved_before_a_horizon_is_stored_at_its_node() -> None:
    master = Master(limits=DirectoryLimits(kept_removals=2))
    node, other = master.register("a"), master.register("b")
    master.sync(node)
    master.sync(other, *(Event(b"%d" % number, number + 1) for number in range(4)))
    granted = master.directory.reserve(TENANT, [b"new", b"late"], [100] * 2, local_node=node.node_id, now_ns=master.now_ns)
    node.owed = other.owed = 1
    master.remove(*(b"%d" % number for number in range(4)))
    generations = list(granted.generations)
    assert node.removal_horizon >= max(generations), "it is not settled: it may have what is removed"
    [drop] = master.publish(other, Event(b"late", generations[1]))
    assert drop == (other.node_id, DeleteBlocks(1, TENANT, [b"late"], [generations[1]], force=1))
    assert master.publish(node, Event(b"new", generations[0])) == []
    assert master.exists(b"new", b"late") == [1, 0]


@pytest.mark.promise("remove-stays-removed")
def test_node_owes_drops_until_acknowledged_or_registered() -> None:
    master = Master()
    node = master.register("a")
    node.removal_horizon = 5
    plans = [master.directory.plan_publish(node.node_id, publish(node.epoch, [Event(key, 5)])) for key in (b"k", b"l")]
    assert node.owed == 2
    master.directory.drops_acknowledged(plans[0])
    assert node.owed == 1
    node = master.register("a")
    assert node.owed == 0, "its inventory names it again"
    master.directory.drops_acknowledged(plans[1])
    assert node.owed == 0
    master.directory.disconnected(node.node_id, node.epoch, 0)
    master.forget("a")
    master.directory.drops_acknowledged(plans[1])


KEYS = st.integers(0, 9).map(lambda number: b"%d" % number)
EVENTS = st.builds(
    Event,
    key=KEYS,
    generation=st.integers(1, 4),
    kind=st.sampled_from([EVENT_COMMIT] * 6 + [EVENT_REMOVED, EVENT_MOVED]),
    tiers=st.sampled_from([DRAM, DRAM, DRAM, NVME]),
    tenant=st.sampled_from([TENANT] * 5 + ["blue"]),
    namespace=st.sampled_from(["ns"] * 5 + ["other"]),
    parent=st.one_of(st.just(b""), KEYS),
)
GONE = st.builds(Event, key=KEYS, generation=st.integers(1, 4), kind=st.just(EVENT_REMOVED))
ACTIONS: st.SearchStrategy[tuple[str, int, list[Event]]] = st.one_of(
    st.tuples(st.just("plan"), st.integers(1, 2), st.lists(EVENTS, max_size=5)),
    st.tuples(st.just("plan"), st.integers(1, 2), st.lists(GONE, min_size=1, max_size=5)),
    st.tuples(st.just("inventory"), st.integers(1, 2), st.lists(EVENTS, max_size=2)),
    st.tuples(st.just("end"), st.integers(1, 2), st.lists(EVENTS, max_size=2)),
    st.tuples(st.just("durable"), st.integers(1, 3), st.just([])),
    st.tuples(st.just("remove"), st.integers(0, 9), st.just([])),
    st.tuples(st.just("register"), st.just(1), st.just([])),
    st.tuples(st.just("pin"), st.integers(0, 9), st.just([])),
)


def singly(changes: Iterable[Change]) -> list[Change]:
    """Puts and deletes of one block each."""
    found: list[Change] = []
    for change in changes:
        if isinstance(change, BlockDeletes):
            found += [BlockDeletes(change.tenant, (key,)) for key in change.keys]
        elif isinstance(change, BlockPuts):
            found += [BlockPuts(change.tenant, *([value] for value in block)) for block in zip(*change[1:], strict=True)]
        else:
            found.append(change)
    return found


PHASES = {"plan": PHASE_STREAM, "inventory": PHASE_SYNC_BEGIN, "end": PHASE_SYNC_END}


class Publisher:
    """Applies actions and returns their effects."""

    def __init__(self) -> None:
        self.master = Master()
        self.epochs = {number: self.master.register(name).epoch for number, name in ((1, "a"), (2, "b"))}
        self.plans: list[PublishPlan] = []

    def act(self, what: str, number: int, events: list[Event]) -> list[object]:
        master, told = self.master, list[object]()
        if what in PHASES:
            known = self.held_by(number) if what == "inventory" else []
            made = plan(master, self.epochs[number], *known, *events, node_id=number, phase=PHASES[what])
            self.plans.append(made)
            told = [singly(made.ops), list(made.commands.messages()), [(tenant.name, key) for tenant, key in made.commits]]
        elif what == "durable":
            for made in self.plans[:number]:
                master.commit(made.ops)
                effects = master.directory.apply(made)
                master.commit(effects.ops)
                told += [singly(effects.ops), list(effects.commands.messages())]
            del self.plans[:number]
        elif what == "remove":
            told = [master.remove(b"%d" % number)]
        elif what == "register":
            self.epochs[number] = master.register("a").epoch
        else:
            told = [master.directory.pins.pin(TENANT, [b"%d" % number], pinned=True).flags]
        master.directory.check_integrity()
        keys = [b"%d" % key for key in range(10)]
        found = master.directory.queries.lookup(TENANT, keys)
        rows, tenants = master.directory.columns()
        held = [rows.pairs(tenants.lookup(TENANT).rows.get(key)) for key in keys]
        return [*told, sorted(master.catalog.items()), list(found.nodes), list(found.generations), master.directory.counts(), held]

    def held_by(self, node_id: int) -> list[Event]:
        """The node's blocks in the directory: in NVMe if their generation is even."""
        rows, tenants = self.master.directory.columns()
        found = [(key, rows.generations[row]) for key, row in tenants.lookup(TENANT).rows.items() if node_id in dict(rows.pairs(row))]
        return [Event(key, generation, tiers=DRAM if generation % 2 else NVME) for key, generation in sorted(found)]


@given(st.lists(ACTIONS, max_size=12))
@settings(max_examples=150)
def test_batched_commits_equal_single_commits(actions: list[tuple[str, int, list[Event]]]) -> None:
    together, one_by_one = Publisher(), Publisher()
    for what, number, events in actions:
        with patch.object(publishing, "MIN_NEW", 1), patch.object(publishing, "SMALL_BATCH", 0):
            first = together.act(what, number, events)
        assert first == one_by_one.act(what, number, events)


@pytest.mark.parametrize("gone_keys", [[], [b"3"]])
def test_inventory_batch_updates_tiers(gone_keys: list[bytes]) -> None:
    named, master = many(20), Master()
    master.publish(master.register("a"), *named)
    master.publish(master.register("b"), *named[:10])
    node = master.register("a")
    told = [Event(event.key, event.generation, tiers=NVME) for event in named if event.key not in gone_keys]
    master.sync(node, *told)
    assert master.directory.blocks_at(node.node_id) == len(told)
    rows, tenants = master.directory.columns()
    states = {dict(rows.pairs(row)).get(node.node_id) for _key, row in tenants.lookup(TENANT).rows.items()}
    assert states == ({NVME, None} if gone_keys else {NVME}), "no hints any more"


def many(count: int = MIN_NEW, **options: object) -> list[Event]:
    return [Event(b"%d" % number, 10 + number, **options) for number in range(count)]  # type: ignore[arg-type]


def test_many_pinned_blocks_that_are_gone_leave_no_pins() -> None:
    keys = [b"%03d" % number for number in range(2 * SMALL_BATCH)]
    master, node = one_node(*keys)
    other = master.register("b")
    master.publish(other, *(Event(key) for key in keys[:3]))
    master.commit(master.directory.pins.pin(TENANT, keys, pinned=True).ops)
    master.publish(node, *(Event(key, 1, EVENT_REMOVED) for key in keys))
    assert master.exists(*keys) == [1] * 3 + [0] * (len(keys) - 3)
    assert len([key for key in master.catalog if key.startswith(b"p")]) == 3
    master.directory.check_integrity()
