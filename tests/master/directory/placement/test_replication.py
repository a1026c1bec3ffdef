"""Tests of replication.py: only missing blocks are ordered, and only current versions are entered."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.master.directory.membership.members import NodeInfo, NodeMember
from kvstore.master.directory.placement import replication
from kvstore.master.directory.placement.replication import ORDER_TTL_S, SPARE_ENDS, ReplicaPlanner
from kvstore.master.directory.writes.removals import Removal
from kvstore.protocol import frames
from kvstore.protocol.catalog_messages import EVENT_REMOVED, CopyBlocks, CopyResult, DeleteBlocks, SetPinned
from kvstore.protocol.errors import InvalidArgument, Unavailable
from tests.master.blocks import TENANT, Event, Master, S, publish

KEYS = [b"a", b"b", b"c"]
NAMES = ("one", "two")
SOME_KEYS = (b"a", b"b")


class Pair:
    """A master with the nodes `source`, which holds a, b and c at generations 1, 2 and 3, and `target`, which holds nothing."""

    def __init__(self) -> None:
        self.master = Master()
        self.source = self.register("source")
        self.target = self.register("target")
        self.master.sync(self.source, *(Event(key, generation) for generation, key in enumerate(KEYS, start=1)))
        self.master.sync(self.target)

    @property
    def copying(self) -> ReplicaPlanner:
        return self.master.directory.replication

    def register(self, name: str, instance: int = 1) -> NodeMember:
        info = NodeInfo(name, instance, host_id=f"{name}'s host", unix=f"/{name}", tcp=f"{name}:1")
        node, ops = self.master.directory.register(info, (), self.master.now_ns)
        self.master.commit(ops)
        return node

    def plan(self, *keys: bytes, tenant: str = TENANT, to: NodeMember | None = None) -> list[CopyBlocks]:
        found = self.copying.plan(
            tenant,
            keys or KEYS,
            node_id=(to or self.target).node_id,
            source_node_id=self.source.node_id,
            now_ns=self.master.now_ns,
        )
        self.master.directory.check_integrity()
        return found

    def report(self, *keys: bytes, generations: Sequence[int] = (1, 2, 3), arrived: Sequence[int] = (), epoch: int = 0) -> list[int]:
        """Report from the target that these arrived, and the master's flags."""
        wanted = list(keys or KEYS)
        message = CopyResult(
            epoch or self.target.epoch, TENANT, wanted, list(generations[: len(wanted)]), bytes(arrived or [1] * len(wanted))
        )
        entered = self.copying.enter(self.target.node_id, message)
        self.master.commit(entered.ops)
        self.master.directory.check_integrity()
        return list(entered.flags)

    def holders(self, key: bytes) -> list[int]:
        return list(self.master.directory.queries.lookup(TENANT, [key]).nodes)

    @property
    def both(self) -> list[int]:
        return [self.source.node_id, self.target.node_id]


@pytest.fixture
def pair() -> Pair:
    return Pair()


# --- orders ---


def test_an_order_names_the_source_and_each_block_as_it_is_known(pair: Pair) -> None:
    pair.master.publish(pair.source, Event(b"child", 4, size=50, checksum=9, parent=b"a"))
    assert pair.plan(b"child", b"a") == [
        CopyBlocks(1, TENANT, "ns", 1, "source's host", "/source", "source:1", [b"child", b"a"], [50, 100], [9, 7], [4, 1], [b"a", b""], [])
    ]


def test_plan_orders_only_missing_blocks_of_the_source(pair: Pair) -> None:
    other = pair.register("other")
    pair.master.sync(other, Event(b"elsewhere", 5))
    pair.master.publish(pair.target, Event(b"b", 2))
    [order] = pair.plan(b"c", b"b", b"none", b"a", b"elsewhere", b"c")
    assert (order.keys, order.generations) == ([b"c", b"a"], [3, 1])
    assert not pair.plan(tenant="blue"), "another tenant's"


def test_copy_under_way_is_not_ordered_twice(pair: Pair) -> None:
    assert [order.keys for order in pair.plan()] == [KEYS]
    assert not pair.plan()
    other = pair.register("other")
    assert [order.keys for order in pair.plan(to=other)] == [KEYS]
    assert len(pair.copying) == 6
    assert pair.report() == [1, 1, 1]
    assert len(pair.copying) == 3


def test_each_namespace_and_each_full_message_is_an_order(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert frames.MAX_BATCH == 65_536
    monkeypatch.setattr(replication, "MAX_BATCH", 2)
    pair.master.publish(pair.source, Event(b"d", 4, namespace="other"))
    found = pair.plan(b"a", b"d", b"b", b"c")
    assert [(order.namespace, order.keys) for order in found] == [("ns", [b"a", b"b"]), ("ns", [b"c"]), ("other", [b"d"])]


def test_there_are_no_more_orders_than_the_limit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "MAX_ORDERS", 2)
    assert [order.keys for order in pair.plan()] == [[b"a", b"b"]]
    assert not pair.plan()
    assert pair.report(b"a", b"b") == [1, 1]
    assert [order.keys for order in pair.plan()] == [[b"c"]]


def test_ended_orders_do_not_count(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "MAX_ORDERS", 2)
    assert pair.plan(b"a")
    for _ in range(2 * SPARE_ENDS):
        [order] = pair.plan(b"b")
        pair.copying.answered(pair.target.node_id, order, None)
    assert len(pair.copying) == 1
    assert len(pair.copying._expiry) <= SPARE_ENDS + 3


@pytest.mark.parametrize("end", ["its link breaks", "it is silent", "it registers again"])
def test_the_orders_of_a_node_end_with_its_registration(pair: Pair, end: str) -> None:
    directory, third = pair.master.directory, pair.register("third")
    pair.master.sync(third)
    pair.plan()
    pair.plan(to=third)
    if end == "its link breaks":
        assert directory.disconnected(third.node_id, third.epoch, 0)
    elif end == "it registers again":
        pair.register("third")
    else:
        pair.master.now_ns = int(directory._timing.node_ttl_s * S)
        for node in (pair.source, pair.target):
            directory.heartbeat(node.node_id, node.epoch, (), {}, pair.master.now_ns)
        assert directory.run_due(pair.master.now_ns) == [third]
    assert len(pair.copying) == 3
    assert pair.report() == [1, 1, 1]


def test_plan_refuses_dead_nodes_and_self_copies(pair: Pair) -> None:
    plan = pair.copying.plan
    with pytest.raises(InvalidArgument, match="node 1 has no need of copies of its own blocks"):
        plan(TENANT, KEYS, node_id=1, source_node_id=1, now_ns=0)
    with pytest.raises(Unavailable, match="node 9 is not alive"):
        plan(TENANT, KEYS, node_id=9, source_node_id=1, now_ns=0)
    pair.master.directory.disconnected(pair.source.node_id, pair.source.epoch, 0)
    with pytest.raises(Unavailable, match="node 1 is not alive"):
        plan(TENANT, KEYS, node_id=2, source_node_id=1, now_ns=0)
    assert not len(pair.copying)


def test_what_the_node_does_not_try_is_ordered_no_more(pair: Pair) -> None:
    [order] = pair.plan()
    pair.copying.answered(pair.target.node_id, order, b"\1\0\1")
    assert pair.report() == [1, 0, 1]
    [order] = pair.plan()
    assert order.keys == [b"b"]
    pair.copying.answered(pair.target.node_id, order, None)
    assert not len(pair.copying)


def test_an_order_ends_with_its_time(pair: Pair) -> None:
    pair.plan(b"a")
    pair.master.now_ns = int(ORDER_TTL_S * S) - 1
    pair.plan(b"b")
    assert len(pair.copying) == 2
    pair.master.now_ns += 1
    for node in (pair.source, pair.target):
        pair.master.directory.heartbeat(node.node_id, node.epoch, (), {}, pair.master.now_ns)
    assert not pair.master.directory.run_due(pair.master.now_ns)
    assert len(pair.copying) == 1
    assert pair.report(b"a", b"b") == [0, 1]


# --- what arrives ---


def test_arrived_copy_makes_the_node_a_holder(pair: Pair) -> None:
    pair.plan()
    assert pair.report(arrived=[1, 0, 1]) == [1, 0, 1]
    assert [pair.holders(key) for key in KEYS] == [pair.both, [1], pair.both]
    assert not len(pair.copying)
    later = Master(2, pair.master.catalog).directory
    assert later.blocks_at(1) == 3
    assert later.blocks_at(2) == 2


@pytest.mark.promise("replicas-survive")
def test_the_copy_is_there_when_the_source_is_not(pair: Pair) -> None:
    pair.plan()
    pair.report()
    pair.master.directory.disconnected(pair.source.node_id, pair.source.epoch, 0)
    assert pair.holders(b"a") == [2]


def test_copy_without_order_or_of_another_version_is_refused(pair: Pair) -> None:
    assert pair.report() == [0, 0, 0]
    pair.plan()
    assert pair.report(generations=[2, 3, 1]) == [0, 0, 0]
    assert pair.report() == [1, 1, 1], "what somebody says of other generations ends no order"
    assert pair.report() == [0, 0, 0], "an order is good for once"
    unknown = CopyResult(pair.target.epoch, "blue", [b"a"], [1], b"\1")
    assert pair.copying.enter(pair.target.node_id, unknown).flags == b"\0"


@pytest.mark.promise("copies-versioned")
def test_a_block_removed_meanwhile_does_not_come_back(pair: Pair) -> None:
    pair.plan()
    directory = pair.master.directory
    removal = directory.removing.plan(TENANT, [b"a"], force=False)
    assert [node_id for node_id, _drop in removal.commands.messages()] == [1]
    assert pair.report(b"a") == [0], "while the source is asked to drop it"
    assert pair.plan() == [], "nor is it ordered once more"
    pair.master.commit(directory.removing.dropped(1, TENANT, [b"a"], [1], b"\1"))
    assert pair.report(b"a") == [0]
    assert pair.master.exists(b"a") == [0]


def test_pending_version_replaces_the_copy(pair: Pair) -> None:
    """The copy is entered, and told to go with the other holder once the newer version is durable."""
    other = pair.register("other")
    pair.master.sync(other)
    pair.plan()
    directory = pair.master.directory
    plan = directory.plan_publish(other.node_id, publish(other.epoch, [Event(b"a", 50, checksum=8)]))
    assert pair.report(b"a") == [1]
    effects = directory.apply(plan)
    assert sorted(node_id for node_id, _drop in effects.commands.messages()) == pair.both
    assert pair.holders(b"a") == [other.node_id]


def test_removed_block_is_not_ordered_from_a_stale_holder(pair: Pair) -> None:
    other = pair.register("other")
    pair.master.directory.disconnected(other.node_id, other.epoch, 0)
    pair.master.directory.removing.plan(TENANT, [b"a"], force=False)
    assert [order.keys for order in pair.plan()] == [[b"b", b"c"]], "the source has not said yet that it dropped it"


def test_a_pinned_block_is_pinned_at_its_new_holder(pair: Pair) -> None:
    pair.master.directory.pins.pin(TENANT, [b"b"], pinned=True)
    pair.plan()
    entered = pair.copying.enter(pair.target.node_id, CopyResult(pair.target.epoch, TENANT, KEYS, [1, 2, 3], b"\1\1\1"))
    assert entered.commands.messages() == [(2, SetPinned(1, TENANT, [b"b"], 1))]


# --- in any order ---


@pytest.mark.promise("copies-versioned")
class AgainstTwoStores(RuleBasedStateMachine):
    """Two nodes that write, evict, copy from one another and come back, while blocks are removed: the directory names exactly what they
    hold, and no copy outlives the removal of its block. Commands to drop are under way for a while, all else happens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.master = Master()
        self.nodes = {name: self.master.register(name) for name in NAMES}
        self.held: dict[str, dict[bytes, int]] = {name: {} for name in NAMES}
        self.copies: dict[str, dict[bytes, tuple[int, int]]] = {name: {} for name in NAMES}
        """To each node: the generation, and the step of its order."""
        self.drops: list[tuple[int, bytes, int, Removal]] = []
        self.removed = dict.fromkeys(SOME_KEYS, 0)
        self.step = 0
        self.generation = 0
        for node in self.nodes.values():
            self.master.sync(node)

    def name_of(self, node_id: int) -> str:
        return next(name for name, node in self.nodes.items() if node.node_id == node_id)

    def drop(self, node_id: int, key: bytes, generation: int) -> bool:
        held = self.held[self.name_of(node_id)]
        is_dropped = key in held and held[key] <= generation
        if is_dropped:
            del held[key]
        return is_dropped

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from(SOME_KEYS))
    def write(self, name: str, key: bytes) -> None:
        if key in self.copies[name]:
            return  # a key has one writer at a time, and a copy is one
        self.generation += 1
        self.held[name][key] = self.generation
        for node_id, command in self.master.publish(self.nodes[name], Event(key, self.generation)):
            assert isinstance(command, DeleteBlocks)
            for dropped, generation in zip(command.keys, command.generations, strict=True):
                self.drop(node_id, dropped, generation)

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from(SOME_KEYS))
    def evict(self, name: str, key: bytes) -> None:
        if key in self.held[name]:
            self.master.publish(self.nodes[name], Event(key, self.held[name].pop(key), EVENT_REMOVED))

    @rule(key=st.sampled_from(SOME_KEYS))
    def remove(self, key: bytes) -> None:
        self.step += 1
        self.removed[key] = self.step
        removal = self.master.directory.removing.plan(TENANT, [key], force=False)
        for node_id, command in removal.commands.messages():
            assert isinstance(command, DeleteBlocks)
            self.drops += [(node_id, key, generation, removal) for key, generation in zip(command.keys, command.generations, strict=True)]

    @rule()
    @precondition(lambda self: self.drops)
    def a_drop_arrives(self) -> None:
        node_id, key, generation, removal = self.drops.pop(0)
        flag = self.drop(node_id, key, generation)
        self.master.commit(self.master.directory.removing.dropped(node_id, TENANT, [key], [generation], bytes([flag])))
        if all(other is not removal for *_, other in self.drops):
            self.master.directory.removing.over(TENANT, removal)

    @rule(name=st.sampled_from(NAMES))
    def copy(self, name: str) -> None:
        source = self.nodes["two" if name == "one" else "one"]
        self.step += 1
        orders = self.master.directory.replication.plan(
            TENANT, SOME_KEYS, node_id=self.nodes[name].node_id, source_node_id=source.node_id, now_ns=self.master.now_ns
        )
        for order in orders:
            flags = bytes(key not in self.copies[name] for key in order.keys)
            self.master.directory.replication.answered(self.nodes[name].node_id, order, flags)
            ordered = zip(order.keys, order.generations, flags, strict=True)
            self.copies[name].update({key: (generation, self.step) for key, generation, flag in ordered if flag})

    @rule(name=st.sampled_from(NAMES))
    @precondition(lambda self: any(self.copies.values()))
    def copies_arrive(self, name: str) -> None:
        copies, self.copies[name] = self.copies[name], {}
        generations = [generation for generation, _step in copies.values()]
        report = CopyResult(self.nodes[name].epoch, TENANT, list(copies), generations, b"\1" * len(copies))
        entered = self.master.directory.replication.enter(self.nodes[name].node_id, report)
        self.master.commit(entered.ops)
        for (key, (generation, step)), flag in zip(copies.items(), entered.flags, strict=True):
            if flag:
                assert step > self.removed[key], "it was under way when its block was removed"
                self.held[name][key] = generation

    @rule(name=st.sampled_from(NAMES))
    def come_back(self, name: str) -> None:
        self.copies[name].clear()
        self.nodes[name] = self.master.register(name)
        for node_id, command in self.master.sync(self.nodes[name], *(Event(key, held) for key, held in self.held[name].items())):
            assert isinstance(command, DeleteBlocks)
            for key, generation in zip(command.keys, command.generations, strict=True):
                self.drop(node_id, key, generation)

    @invariant()
    def the_directory_names_what_is_held(self) -> None:
        self.master.directory.check_integrity()
        for key in SOME_KEYS:
            found = self.master.directory.queries.lookup(TENANT, [key])
            shown = dict.fromkeys(map(self.name_of, found.nodes), found.generations[0])
            assert shown == {name: held[key] for name, held in self.held.items() if key in held}, key


TestAgainstTwoStores = AgainstTwoStores.TestCase
TestAgainstTwoStores.settings = settings(max_examples=90, stateful_step_count=30)
