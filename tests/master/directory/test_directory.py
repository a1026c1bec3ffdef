"""Tests of directory.py; a state machine holds it against the nodes' own stores, through deaths, restarts and kills."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.master.catalogs.interface import BlockPuts, Change
from kvstore.master.directory.bounds import DirectoryLimits, DirectoryTiming
from kvstore.master.directory.membership.members import NodeInfo, NodeMember
from kvstore.master.directory.records import Description, GrantedRecord, decode
from kvstore.master.directory.writes.block_events import PublishPlan
from kvstore.master.directory.writes.record_policy import ALL, MEMBERSHIP, OUTLIVING
from kvstore.master.directory.writes.removals import Removal
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import (
    EVENT_COMMIT,
    EVENT_MOVED,
    EVENT_REMOVED,
    PHASE_STREAM,
    PHASE_SYNC,
    PHASE_SYNC_BEGIN,
    PHASE_SYNC_END,
    DeleteBlocks,
    Digests,
    SetPinned,
)
from kvstore.protocol.errors import Corrupt, InvalidArgument, QuotaExceeded, StaleEpoch, Unavailable
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.security.quotas.quota import Quota
from tests.master.blocks import DRAM, NVME, TENANT, Event, Master, S, die, one_node, publish, tier_of


def reserve(master: Master, *keys: bytes, size: int = 1, local_node: int = 0, avoid: int = 0, now_ns: int = 0) -> ReserveReply:
    grants = master.directory.reserve(TENANT, keys, [size] * len(keys), local_node=local_node, avoid=avoid, now_ns=now_ns)
    master.directory.check_integrity()
    return grants


# Reserve


def test_reserve_reports_granted_present_and_busy() -> None:
    master, node = one_node(b"there")
    first = reserve(master, b"new", b"there", b"new")
    assert first.statuses == bytes([GRANTED, PRESENT, BUSY])
    assert list(first.nodes) == [1, 0, 0]
    assert (first.generations[0] > 1000, list(first.generations[1:])) == (True, [0, 0])
    assert reserve(master, b"new").statuses == bytes([BUSY])
    master.directory.plan_publish(1, publish(node.epoch, [Event(b"pending")]))
    assert reserve(master, b"pending").statuses == bytes([BUSY])


@pytest.mark.promise("put-conflicts")
def test_unconfirmed_block_is_not_present() -> None:
    """A writer relies on PRESENT; the node may have lost the block while it was disconnected."""
    master, node = one_node(b"lost", b"kept")
    master.publish(node, phase=PHASE_SYNC_BEGIN)
    assert reserve(master, b"lost", b"kept", b"new").statuses == bytes([BUSY, BUSY, GRANTED])
    assert master.exists(b"lost", b"kept") == [1, 1], "a read of it is a miss at worst"
    master.publish(node, Event(b"kept"), phase=PHASE_SYNC)
    assert reserve(master, b"lost", b"kept").statuses == bytes([BUSY, PRESENT])
    master.publish(node, phase=PHASE_SYNC_END)
    assert reserve(master, b"lost", b"kept").statuses == bytes([GRANTED, PRESENT])


def test_reservation_ends_by_cancel_expiry_or_node_death() -> None:
    master, node = one_node()
    grants = reserve(master, b"a")
    master.directory.cancel(TENANT, [b"a"], [grants.generations[0] + 1])
    assert reserve(master, b"a").statuses == bytes([BUSY])
    master.directory.cancel(TENANT, [b"a"], grants.generations)
    assert reserve(master, b"a").statuses == bytes([GRANTED])
    assert reserve(master, b"a", now_ns=30 * S).statuses == bytes([GRANTED])
    die(master, node)
    with pytest.raises(Unavailable):
        reserve(master, b"a")
    other = master.register("b")
    assert list(reserve(master, b"a").nodes) == [other.node_id]


@pytest.mark.promise("failover")
def test_generations_grow_when_the_clock_goes_back() -> None:
    master, node = one_node()
    master.publish(node, Event(b"k", 1 << 60))
    again = master.restart()
    again.register("a")
    assert reserve(again, b"new").generations[0] > 1 << 60


def test_what_a_node_said_of_itself_outlives_the_master() -> None:
    master = Master()
    node = master.register("a", description=Description(b"topology", b"transfer"))
    master.register("b")
    assert [each.description for each in master.restart().directory.members] == [Description(b"topology", b"transfer"), Description()]
    master.commit(master.directory.describe(node.node_id, node.epoch, topology=bytes(100_000), transfer=None))
    again = master.restart()
    found = again.directory.members.named("a")
    assert found is not None
    assert (found.description, found.state) == (Description(bytes(100_000), b"transfer"), "dead")
    again.register("a", 2)
    assert found.description == Description(), "its heir has said nothing"
    assert not [key for key in again.catalog if key.startswith(b"d")]


def test_a_reserve_that_cannot_be_met_reserves_nothing() -> None:
    master, _ = one_node()
    for size in (0, (1 << 30) + 1):
        with pytest.raises(InvalidArgument, match="1 to 1073741824"):
            reserve(master, b"a", size=size)
    with pytest.raises(Unavailable):
        reserve(master, b"a", avoid=1)
    small = Master()
    small.register("a", 1, tier_of(capacity_bytes=10))
    with pytest.raises(InvalidArgument, match="larger"):
        reserve(small, b"a", size=11)
    assert reserve(master).statuses == b""
    assert master.directory.counts().reserved == 0


# Nodes


def test_measured_rates_are_replaced_and_expire() -> None:
    master, node = one_node()
    ttl_ns = int(DirectoryTiming().measured_rate_ttl_s * S)
    master.directory.set_rates(1, node.epoch, [pb.PeerRate(node_id=7, bytes_per_s=5.0)], 0)
    assert node.rates.bytes_per_s(ttl_ns - 1) == {7: 5.0}
    assert node.rates.bytes_per_s(ttl_ns) == {}
    master.directory.set_rates(1, node.epoch, [pb.PeerRate(node_id=8, bytes_per_s=6.0)], ttl_ns)
    assert node.rates.bytes_per_s(ttl_ns) == {8: 6.0}
    with pytest.raises(InvalidArgument):
        master.directory.set_rates(1, node.epoch, [pb.PeerRate(node_id=9)], ttl_ns)
    with pytest.raises(StaleEpoch):
        master.directory.set_rates(1, node.epoch - 1, [], ttl_ns)
    assert node.rates.bytes_per_s(ttl_ns) == {8: 6.0}, "a refused report changes nothing"


@pytest.mark.promise("dead-node")
def test_dead_nodes_blocks_return_with_it() -> None:
    master, node = one_node(b"a", b"b")
    die(master, node)
    assert master.exists(b"a") == [0]
    master.sync(master.register("a"), Event(b"a"))
    assert master.exists(b"a", b"b") == [1, 0]


def test_silent_nodes_rows_are_deleted_in_slices() -> None:
    master, node = one_node(*(bytes([n]) for n in range(10)))
    keeper = master.register("b")
    assert master.directory.run_due(9 * S) == []
    master.directory.heartbeat(2, keeper.epoch, (tier_of(),), {}, 9 * S)
    assert master.directory.run_due(10 * S) == [node]
    assert master.directory.delete_unheld(100) == []
    master.directory.heartbeat(2, keeper.epoch, (tier_of(),), {}, 69 * S)
    master.directory.run_due(70 * S)
    assert (master.directory.blocks_at(1), master.directory.counts().blocks) == (0, 0)
    assert len(master.directory.delete_unheld(4)) == 3
    while ops := master.directory.delete_unheld(4):
        master.commit(ops)
    master.directory.check_integrity()
    assert master.directory.counts().blocks == 0


def test_returning_node_keeps_blocks_before_the_scan() -> None:
    master, node = one_node(b"a", b"b")
    die(master, node)
    master.directory.run_due(100 * S)
    master.now_ns = 100 * S
    master.sync(master.register("a"), Event(b"a"))
    master.delete_unheld()
    assert master.exists(b"a", b"b") == [1, 0]
    assert [key for key in master.catalog if key.startswith(b"b")] == [b"b\x03reda"]


# The catalog


def test_catalog_keeps_the_reported_parent() -> None:
    master, node = one_node(b"p")
    master.publish(node, Event(b"c", parent=b"p"), Event(b"orphan", parent=b"unknown"))
    master.publish(node, Event(b"p", 1, EVENT_REMOVED))
    master = master.restart()
    assert master.register("a").node_id == 1
    assert master.exists(b"c", b"p", b"orphan") == [1, 0, 1]
    assert (master.block(b"c").parents, master.block(b"orphan").parents) == ([b"p"], [b"unknown"])


@pytest.mark.promise("records-durable")
def test_pins_outlive_the_master() -> None:
    master, _ = one_node(b"a")
    master.commit(master.directory.pins.pin(TENANT, [b"a"], pinned=True).ops)
    again = master.restart()
    assert again.directory.counts().pinned == 1
    assert again.sync(again.register("a"), Event(b"a")) == [(1, SetPinned(2, TENANT, [b"a"], 1))]


def test_a_catalog_of_something_else_is_refused() -> None:
    with pytest.raises(Corrupt, match="something else"):
        Master(1, {b"zoo": b""})


# Evictions


def test_forgotten_nodes_blocks_are_deleted_after_a_restart() -> None:
    master, node = one_node(b"a", b"b")
    die(master, node)
    master.forget("a")
    assert not [key for key in master.catalog if key[:1] in b"nd"]
    master = master.restart()
    master.delete_unheld()
    assert not [key for key in master.catalog if key.startswith(b"b")]


def test_parent_cycles_are_deleted_like_other_blocks() -> None:
    links = {b"1": b"2", b"2": b"3", b"3": b"1", b"own": b"own"}
    master = Master()
    master.sync(master.register("a"), *(Event(key, parent=parent) for key, parent in links.items()))
    master = master.restart()
    master.sync(master.register("a"), *(Event(key, parent=parent) for key, parent in links.items()))
    assert master.directory.queries.match_prefix(TENANT, list(links)) == 4
    assert master.remove(*links) == [1, 1, 1, 1]
    master.delete_unheld()
    master.directory.run_due(master.now_ns)
    assert master.directory._tenants.get(TENANT) is None, "no row is left"


def test_the_description_of_a_forgotten_node_leaves_the_catalog() -> None:
    master = Master()
    node = master.register("a", description=Description(b"topology", b"transfer"))
    assert [key for key in master.catalog if key.startswith(b"d")]
    die(master, node)
    master.forget("a")
    assert list(master.catalog) == [b"f"]
    with pytest.raises(InvalidArgument, match="there is no node 'a'"):
        master.directory.forget("a")


KEYS = st.sampled_from([b"a", b"b"])
NAMES = st.sampled_from(["one", "two"])
LIMITS = DirectoryLimits(kept_removals=1, timing=DirectoryTiming(slow_start_s=0))


class Store:
    """The node's real blocks: key to (generation, tier mask), and which were acknowledged under its registration."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[int, int]] = {}
        self.acknowledged: set[bytes] = set()
        self.writes: dict[bytes, int] = {}
        """Number of writes of each key: distinguishes two writes of one generation."""
        self.instance = 1
        self.node: NodeMember | None = None
        self.is_synced = False
        self.hears = True
        """It gets the commands that its own events cause."""

    def drop(self, key: bytes) -> None:
        self.blocks.pop(key, None)
        self.acknowledged.discard(key)


@pytest.mark.promise("remove-stays-removed")
class AgainstNodes(RuleBasedStateMachine):
    """The directory lists exactly the blocks of a node after its inventory, and all acknowledged ones.

    Batches for the catalog are queued and become durable one by one; a killed master loses the queue and nothing
    else. `recorded` is the record policy."""

    recorded = ALL

    def __init__(self) -> None:
        super().__init__()
        self.master = Master(limits=replace(LIMITS, timing=DirectoryTiming(reserve_ttl_s=5, slow_start_s=0)), recorded=self.recorded)
        self.stores = {"one": Store(), "two": Store()}
        self.queue: list[tuple[Sequence[Change], Callable[[], None]]] = []
        self.generation = 0
        self.removed: dict[bytes, int] = {}
        """Keys whose removal was acknowledged, and the newest generation that it can have been of."""
        for name in self.stores:
            self.comes_back(name, restarted=True)

    def publish(self, name: str, *events: Event, phase: int = PHASE_STREAM) -> None:
        store = self.stores[name]
        if store.node is None or not store.node.is_live:
            return
        plan = self.master.directory.plan_publish(store.node.node_id, publish(store.node.epoch, events, phase))
        commits = [(event.key, store.writes[event.key]) for event in events if event.kind == EVENT_COMMIT]
        self.queue.append((plan.ops, lambda: self._published(name, plan, commits)))
        if store.hears:
            self.obey(plan.commands.messages())
            self.master.directory.drops_acknowledged(plan)

    def obey(self, commands: list[tuple[int, DeleteBlocks | SetPinned]]) -> list[tuple[int, DeleteBlocks, bytes]]:
        answers = []
        for node_id, command in commands:
            name = next(name for name, store in self.stores.items() if store.node and store.node.node_id == node_id)
            if isinstance(command, DeleteBlocks):
                blocks = zip(command.keys, command.generations, strict=True)
                answers.append((node_id, command, bytes([self.drop(name, key, generation) for key, generation in blocks])))
        return answers

    def drop(self, name: str, key: bytes, generation: int) -> bool:
        store = self.stores[name]
        if key not in store.blocks or store.blocks[key][0] > generation or not (store.node and store.node.is_live):
            return False
        present = store.blocks[key][0]
        store.drop(key)
        self.publish(name, Event(key, present, EVENT_REMOVED))
        return True

    @rule(name=NAMES, key=KEYS, tiers=st.sampled_from([DRAM, NVME]), newer=st.booleans())
    def write(self, name: str, key: bytes, tiers: int, newer: bool) -> None:
        store = self.stores[name]
        if store.node and store.node.is_live:
            if newer or self.generation <= self.removed.get(key, 0):  # none is granted again after a removal
                self.generation = self.master.directory._reservations.last_generation + 1
            store.drop(key)
            store.blocks[key] = (self.generation, tiers)
            store.writes[key] = store.writes.get(key, 0) + 1
            self.publish(name, Event(key, self.generation, checksum=self.generation, tiers=tiers))

    @rule(name=NAMES, key=KEYS)
    def evict(self, name: str, key: bytes) -> None:
        store = self.stores[name]
        if key in store.blocks:
            self.drop(name, key, store.blocks[key][0])

    @rule(name=NAMES, key=KEYS, tiers=st.sampled_from([DRAM, NVME]))
    def move(self, name: str, key: bytes, tiers: int) -> None:
        store = self.stores[name]
        if key in store.blocks and store.node and store.node.is_live:
            store.blocks[key] = (store.blocks[key][0], tiers)
            self.publish(name, Event(key, store.blocks[key][0], EVENT_MOVED, tiers=tiers))

    @rule(batches=st.integers(1, 8))
    @precondition(lambda self: self.queue)
    def durable(self, batches: int) -> None:
        for _ in range(min(batches, len(self.queue))):
            self._durable()

    def _durable(self) -> None:
        ops, then = self.queue.pop(0)
        self.master.commit(ops)
        then()

    def flush(self) -> None:
        while self.queue:
            self._durable()

    def later(self, ops: Sequence[Change]) -> None:
        """For the catalog; no request waits for it."""
        self.queue.append((ops, lambda: None))

    def _published(self, name: str, plan: PublishPlan, commits: list[tuple[bytes, int]]) -> None:
        store = self.stores[name]
        is_known = store.node is not None and self.master.directory.members.get(store.node.node_id) is store.node
        if store.node and is_known and store.node.epoch == plan.epoch and not store.node.written_off:
            store.acknowledged |= {key for key, write in commits if key in store.blocks and store.writes[key] == write}
        effects = self.master.directory.apply(plan)
        self.later(effects.ops)
        self.obey(effects.commands.messages())

    @rule(name=NAMES, restarted=st.booleans())
    def comes_back(self, name: str, restarted: bool) -> None:
        self.lose_link(name)
        self.register(name, restarted)
        self.inventory(name)

    @rule(name=NAMES, restarted=st.booleans())
    def register(self, name: str, restarted: bool) -> None:
        store = self.stores[name]
        if restarted and not (store.node and store.node.is_live):
            store.instance += 1
            store.blocks = {key: block for key, block in store.blocks.items() if block[1] == NVME}
        self._register(name)

    def _register(self, name: str) -> None:
        store = self.stores[name]
        store.node = self.master.register(name, store.instance)
        store.is_synced = False
        store.acknowledged.clear()

    @rule(name=NAMES)
    def inventory(self, name: str) -> None:
        store = self.stores[name]
        if store.node and store.node.is_live:
            self.publish(name, phase=PHASE_SYNC_BEGIN)
            events = [Event(key, gen, checksum=gen, tiers=tiers) for key, (gen, tiers) in store.blocks.items()]
            self.publish(name, *events, phase=PHASE_SYNC)
            self.publish(name, phase=PHASE_SYNC_END)
            store.is_synced = True

    @rule(name=NAMES)
    def lose_link(self, name: str) -> None:
        node = self.stores[name].node
        if node:
            die(self.master, node)

    @rule(name=NAMES)
    def lose_link_before_the_answer(self, name: str) -> None:
        """The inventory arrives, and nothing of what the master says to it."""
        self.stores[name].hears = False
        self.inventory(name)
        self.stores[name].hears = True
        self.lose_link(name)

    @rule(name=NAMES)
    def miss_removals(self, name: str) -> None:
        """Of blocks that both nodes have: more of them than are kept one by one."""
        for key in (b"a", b"b"):
            for each in self.stores:
                self.write(each, key, NVME, newer=each == "one")
        self.flush()
        self.lose_link(name)
        for key in (b"a", b"b"):
            self.remove(key, force=True)
        self.flush()

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        member = self.master.directory.members.named(name)
        if member and not member.is_live:
            _node, ops = self.master.directory.forget(name)
            self.queue.append((ops, lambda: self.later(self.master.directory.horizons_written())))
            self.stores[name].acknowledged.clear()

    @rule(seconds=st.sampled_from([1, 6, 61]))
    def wait(self, seconds: int) -> None:
        self.master.now_ns += seconds * S
        for node in self.master.directory.members.live():
            self.master.directory.heartbeat(node.node_id, node.epoch, (tier_of(),), {}, self.master.now_ns)
        self.master.directory.run_due(self.master.now_ns)

    @rule(rows=st.integers(1, 3))
    def delete_unheld(self, rows: int) -> None:
        self.later(self.master.directory.delete_unheld(rows))

    @rule(key=KEYS, force=st.booleans())
    def remove(self, key: bytes, force: bool) -> None:
        newest = self.master.directory._reservations.last_generation
        for store in self.stores.values():
            if store.node and not store.node.is_live:
                store.acknowledged.discard(key)
        removal = self.master.directory.removing.plan(TENANT, [key], force=force)
        self.queue.append((removal.ops, lambda: self._removal_durable(key, removal, newest)))

    def _removal_durable(self, key: bytes, removal: Removal, newest: int) -> None:
        directory = self.master.directory
        if removal.raises_horizons:
            self.later(directory.horizons_written())
        messages = removal.commands.messages()
        live = {node.node_id for node in directory.members.live()}
        for node_id, drop, flags in self.obey([message for message in messages if message[0] in live]):
            self.later(directory.removing.dropped(node_id, drop.tenant, drop.keys, drop.generations, flags))
        directory.removing.over(TENANT, removal)
        if removal.flags[0] and not self.master.exists(key)[0] and all(node_id in live for node_id, _command in messages):
            self.removed[key] = newest

    @rule(key=KEYS, pinned=st.booleans())
    def pin(self, key: bytes, pinned: bool) -> None:
        self.later(self.master.directory.pins.pin(TENANT, [key], pinned=pinned).ops)

    @rule(key=KEYS)
    def reserve(self, key: bytes) -> None:
        if self.master.directory.members.live():
            grants = self.master.directory.reserve(TENANT, [key], [1], now_ns=self.master.now_ns)
            assert (grants.statuses[0] == PRESENT) == bool(self.master.exists(key)[0])

    @rule()
    def kill_the_master(self) -> None:
        acknowledged = {name: set(store.acknowledged) for name, store in self.stores.items() if store.is_synced}
        self.queue.clear()
        self.master = Master(self.master.epoch + 1, self.master.catalog, LIMITS, recorded=self.recorded)
        for name, keys in acknowledged.items():
            self._register(name)
            for key in keys if self.recorded == ALL else ():
                if not self.is_beaten(name, key):
                    assert self.master.exists(key) == [1], key
        for name in self.stores:
            self._register(name)
            self.inventory(name)

    def is_beaten(self, name: str, key: bytes) -> bool:
        """The catalog names a newer version at a node that is not back yet."""
        return self.master.block(key).generations[0] > self.stores[name].blocks[key][0]

    @invariant()
    def what_is_shown_of_a_node_is_what_it_has(self) -> None:
        self.master.directory.check_integrity()
        for key in (b"a", b"b"):
            found = self.master.directory.queries.lookup(TENANT, [key])
            for name, store in self.stores.items():
                if not (store.node and store.node.is_live and store.is_synced):
                    continue
                shown = store.node.node_id in found.nodes
                assert not shown or store.blocks.get(key, (-1,))[0] == found.generations[0], (name, key)
                assert shown or key not in store.acknowledged, (name, key)
                assert not shown or found.generations[0] > self.removed.get(key, 0), f"{key!r} has come back"
                assert key not in store.acknowledged or b"b\x03red" + key in self.master.catalog or self.recorded != ALL

    @invariant()
    def the_catalog_has_the_records_that_are_thought_to_be_there(self) -> None:
        if not self.queue and self.recorded != ALL:
            found = sum(isinstance(record, BlockPuts) for record in self.master.catalog.values())
            assert found == self.master.directory.record_policy.count()
            assert self.recorded == OUTLIVING or not found


TestAgainstNodes = AgainstNodes.TestCase
TestAgainstNodes.settings = settings(max_examples=150, stateful_step_count=30)


@pytest.mark.promise("records-durable")
class AgainstNodesOutliving(AgainstNodes):
    recorded = OUTLIVING


@pytest.mark.promise("records-durable")
class AgainstNodesMembership(AgainstNodes):
    recorded = MEMBERSHIP


TestAgainstNodesOutliving = AgainstNodesOutliving.TestCase
TestAgainstNodesOutliving.settings = settings(max_examples=60, stateful_step_count=30)
TestAgainstNodesMembership = AgainstNodesMembership.TestCase
TestAgainstNodesMembership.settings = settings(max_examples=40, stateful_step_count=30)


def test_a_put_that_only_drained_nodes_could_take_is_told_so() -> None:
    master = Master()
    with pytest.raises(Unavailable, match=r"could take the blocks$"):
        reserve(master, b"a")
    master.register("a")
    master.commit(master.directory.drains.begin("a", "peers"))
    with pytest.raises(Unavailable, match=r"could take the blocks: 1 of 1 drained$"):
        reserve(master, b"a")
    node = master.register("b")
    assert list(reserve(master, b"a").nodes) == [node.node_id]


def test_generations_are_allowed_ahead() -> None:
    master = Master()
    [first] = master.directory.grants_ahead()
    master.commit([first])
    assert master.directory.grants_ahead() == []
    record = decode(first.key, first.value or b"")
    assert isinstance(record, GrantedRecord)
    later = Master(epoch=2, catalog=master.catalog, wall_ns=0)
    assert later.directory.register(NodeInfo("a", 1, tcp="a:1"), (tier_of(),), 0)[0].epoch > record.generation


def test_nic_counters_are_the_last_report_and_bounded() -> None:
    master, node = one_node()
    links = [pb.LinkFlow(device="eth0", in_bytes=5)]
    master.directory.set_links(node.node_id, node.epoch, links)
    assert node.links == links
    with pytest.raises(InvalidArgument, match="65 NICs: at most 64"):
        master.directory.set_links(node.node_id, node.epoch, links * 65)
    with pytest.raises(StaleEpoch):
        master.directory.set_links(node.node_id, node.epoch + 1, links)
    assert node.links == links


def test_reservations_beyond_the_tenants_quota_are_refused() -> None:
    master = Master(quota=Quota(reservations=1))
    master.register("a")
    assert list(reserve(master, b"k").statuses) == [GRANTED]
    with pytest.raises(QuotaExceeded, match=r"its quota of 1 \(reservations\)"):
        reserve(master, b"l")


def test_what_tenants_have_of_the_master_is_told_by_tenant() -> None:
    master, _ = one_node(b"a")
    assert master.directory.grants_by_tenant() == {}
    master.directory.pins.pin(TENANT, [b"a"], pinned=True)
    reserve(master, b"k", b"l")
    assert master.directory.grants_by_tenant() == {TENANT: (1, 2)}


def test_comparison_requires_a_current_inventory() -> None:
    master = Master()
    node = master.register("a")
    master.sync(node, Event(b"k", 5))
    with pytest.raises(InvalidArgument, match="has not begun, or has completed"):
        master.directory.compare(node.node_id, node.epoch)
    assert node.known_blocks == 0
    again = master.register("a")
    assert again.known_blocks == 1
    found = master.directory.compare(again.node_id, again.epoch)
    assert found.take(Digests(again.epoch, 1, 0, [5], b"\1", [0], b"\2"))
    assert list(found.steps())
    assert found.flags() == [b"\0"]


def test_stopped_state_comes_from_the_catalog() -> None:
    master = Master()
    node = master.register("a")
    master.commit(master.directory.stopping(node.node_id, node.epoch))
    die(master, node)
    again = master.restart()
    assert [each.state for each in again.directory.members] == ["stopped"]
    again.register("a", 2)
    assert [each.state for each in again.restart().directory.members] == ["dead"], "it has come back since, and not said that it ends"
    node = again.directory.members.live()[0]
    again.commit(again.directory.stopping(node.node_id, node.epoch))
    die(again, node)
    again.forget("a")
    assert not list(again.restart().directory.members)


def test_slow_requests_of_a_node_are_the_last_that_it_told() -> None:
    master, node = one_node()
    slow = [pb.SlowRequest(duration_us=5)]
    master.directory.set_slow_requests(node.node_id, node.epoch, slow)
    assert node.slow == slow
    with pytest.raises(InvalidArgument, match="a node reported 65 slow requests: at most 64"):
        master.directory.set_slow_requests(node.node_id, node.epoch, slow * 65)
    with pytest.raises(StaleEpoch):
        master.directory.set_slow_requests(node.node_id, node.epoch + 1, slow)
    assert node.slow == slow
