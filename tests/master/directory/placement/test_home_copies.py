"""Tests of home_copies.py: which blocks of a nearly full node are copied, where to, and which copies become secondary."""

import pytest

from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement import home_copies as module
from kvstore.master.directory.placement.copies import CHECK_COST, CopyLimits, CopyOrder
from kvstore.master.directory.placement.home_copies import REFRESH_NS, HomeNodes
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_REMOVED, PHASE_STREAM, Publish
from tests.master.blocks import TENANT, Event, die, tier_of
from tests.master.directory.placement.copying import KEYS, Copying

SIZE = 100
FULL = tier_of(capacity_bytes=100_000, used_bytes=100_000)
RATE = 1 << 20


class Cluster(Copying):
    """Its node `one` is full."""

    def __init__(
        self, pace: CopyLimits | None = None, rate: int = RATE, parents: list[bytes] | None = None, tier: pb.TierStatus = FULL
    ) -> None:
        limits = DirectoryLimits(pace=pace or CopyLimits(), home_copy_bytes_per_s=rate)
        super().__init__(limits, tier=tier, parents=parents or [b""] * 3)
        self.homes = self.master.directory.home_copies

    def commit(self, *keys: bytes, node: NodeMember | None = None) -> None:
        """The node has committed these blocks; the weights of nodes are as of now."""
        self.step(REFRESH_NS)
        self.homes.committed((node or self.one).node_id, TENANT, list(keys or KEYS), SIZE * len(keys or KEYS))

    def step(self, passed_ns: int = 0) -> list[CopyOrder]:
        return self.ordered(passed_ns, self.homes.step)

    def move(self, *keys: bytes) -> list[CopyOrder]:
        """Commit, until the copies have arrived."""
        self.commit(*keys)
        orders = self.step()
        self.arrive(*orders)
        assert self.step() == []
        return orders

    def may_evict(self, node: NodeMember) -> bytes:
        return self.master.directory.last_replicas.may_evict(node.node_id, node.epoch, TENANT, KEYS)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(parents=[b"", b"a", b"b"])


@pytest.fixture
def empty_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt's home is node 2, wherever it is a choice."""
    monkeypatch.setattr(HomeNodes, "choose", lambda _self, _key: 2)


@pytest.mark.usefixtures("empty_two")
def test_blocks_of_a_full_node_are_copied_home(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    [order] = cluster.move()
    assert (order.node_id, order.source_node_id, order.keys) == (two.node_id, cluster.one.node_id, KEYS)
    assert cluster.homes.take_secondary() == [(cluster.one.node_id, TENANT, KEYS)]
    assert cluster.homes.take_secondary() == []
    assert (cluster.homes.copied_blocks, cluster.homes.copied_bytes) == (3, 3 * SIZE)
    cluster.commit()
    assert cluster.step() == [], "they are at home"


@pytest.mark.promise("last-replica-last")
@pytest.mark.usefixtures("empty_two")
def test_home_keeps_the_block_and_the_source_does_not(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.move()
    assert (cluster.may_evict(cluster.one), cluster.may_evict(two)) == (b"\1\1\1", bytes(3)), "for all generations"


@pytest.mark.usefixtures("empty_two")
def test_a_writers_replicas_are_not_secondary(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.commit(b"a")
    orders = cluster.step()
    cluster.master.commit(cluster.master.directory.targets.ask(TENANT, [b"a"], 2).ops)
    cluster.arrive(*orders)
    assert (cluster.step(), cluster.homes.take_secondary()) == ([], [])


@pytest.mark.usefixtures("empty_two")
def test_published_commits_are_copied_home(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.step(REFRESH_NS)
    cluster.homes.published(cluster.one.node_id, events(cluster.one, b"a", b"b"))
    assert [order.keys for order in cluster.step()] == [[b"a"]]


def test_a_node_with_free_space_copies_nothing() -> None:
    roomy = Cluster(tier=tier_of(capacity_bytes=100_000, used_bytes=80_000))
    roomy.node("two", "y")
    roomy.commit()
    assert roomy.step() == []


@pytest.mark.usefixtures("empty_two")
def test_a_node_that_fills_between_heartbeats_is_full() -> None:
    nearly = Cluster(tier=tier_of(capacity_bytes=1000, used_bytes=1000 - 100 - 2 * SIZE))
    nearly.node("two", "y")
    nearly.commit(b"a", b"b")
    assert nearly.step() == [], "a tenth is free"
    nearly.commit(b"c")
    assert [order.keys for order in nearly.step()] == [[b"c"]]


def test_one_node_alone_copies_nothing(cluster: Cluster) -> None:
    cluster.commit()
    assert cluster.step() == []


def test_rate_zero_turns_home_copies_off() -> None:
    off = Cluster(rate=0)
    off.node("two", "y")
    off.commit()
    assert off.step() == []


@pytest.mark.usefixtures("empty_two")
def test_copies_are_bounded_in_bytes_a_second(cluster: Cluster) -> None:
    slow = Cluster(rate=SIZE)
    slow.node("two", "y")
    slow.commit()
    assert [order.keys for order in slow.step()] == [[b"a"]]
    assert slow.step() == []
    assert [order.keys for order in slow.step(2 * REFRESH_NS)] == [[b"b"]]


@pytest.mark.usefixtures("empty_two")
def test_blocks_that_have_left_count_in_a_step() -> None:
    cluster = Cluster(CopyLimits(rows=2 * CHECK_COST))
    cluster.node("two", "y")
    cluster.commit(b"gone", b"gone too", b"gone as well", b"a")
    assert cluster.step() == []
    assert cluster.homes.skipped_blocks == {"gone": 2}
    assert [order.keys for order in cluster.step()] == [[b"a"]]


@pytest.mark.usefixtures("empty_two")
def test_a_block_committed_twice_is_copied_once() -> None:
    """It was evicted and stored again before its turn. The copies under way stay within their limit."""
    cluster = Cluster(CopyLimits(bytes=2 * SIZE))
    cluster.node("two", "y")
    for _ in range(3):
        cluster.commit(b"a")
        cluster.homes.committed(cluster.one.node_id, TENANT, [b"a"], SIZE)
        orders = cluster.step()
        assert [order.keys for order in orders] == [[b"a"]]
        cluster.arrive(*orders, has_room=False)
    assert cluster.homes.skipped_blocks == {"failed": 2}
    assert not cluster.homes._batcher.is_busy


@pytest.mark.usefixtures("empty_two")
def test_copies_under_way_and_rows_are_bounded() -> None:
    cluster = Cluster(CopyLimits(blocks=2))
    cluster.node("two", "y")
    cluster.commit()
    [order] = cluster.step()
    assert order.keys == KEYS[:2]
    assert cluster.step() == []
    cluster.arrive(order)
    assert [order.keys for order in cluster.step()] == [KEYS[2:]]


@pytest.mark.usefixtures("empty_two")
def test_blocks_beyond_the_queue_are_skipped(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 2)
    cluster.node("two", "y")
    cluster.commit()
    assert (cluster.step(), cluster.homes.skipped_blocks, cluster.homes.skipped_at) == ([], {"queue": 3}, {cluster.one.node_id: 3})


def test_a_prompt_goes_where_its_beginning_is(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HomeNodes, "choose", lambda _self, key: 3 if key == b"a" else 2)
    cluster.node("two", "y")
    three = cluster.node("three", "z")
    [order] = cluster.move(b"a")
    assert order.node_id == three.node_id
    [order] = cluster.move(b"b", b"c")
    assert (order.node_id, order.keys) == (three.node_id, [b"b", b"c"])


@pytest.mark.usefixtures("empty_two")
@pytest.mark.parametrize("is_published", [True, False])
def test_blocks_with_a_named_prompt_go_to_its_home(is_published: bool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HomeNodes, "choose", lambda _self, key: {b"prompt 1": 3}.get(key, 2))
    cluster.node("two", "y")
    three = cluster.node("three", "z")
    cluster.step(REFRESH_NS)
    if is_published:
        message = events(cluster.one, b"b")
        message.prompts = b"prompt 1"
        cluster.homes.published(cluster.one.node_id, message)
    else:
        cluster.homes.committed(cluster.one.node_id, TENANT, [b"b"], SIZE, b"prompt 1")
    assert [(order.node_id, order.keys) for order in cluster.step()] == [(three.node_id, [b"b"])]


def test_masters_with_other_weights_mostly_agree() -> None:
    keys = [b"prompt %d" % number for number in range(4000)]
    one, other = _nodes(0.05, 0.02, 0.3, 0.08), _nodes(0.06, 0.02, 0.28, 0.08)
    assert sum(one.choose(key) == other.choose(key) for key in keys) > 0.95 * len(keys)


@pytest.mark.usefixtures("empty_two")
def test_a_prompt_that_begins_at_the_source_stays(cluster: Cluster) -> None:
    cluster.node("two", "y", tier=FULL)
    cluster.commit(b"b", b"c")
    assert cluster.step() == [], "its first block is at the source alone"


@pytest.mark.usefixtures("empty_two")
def test_no_block_stays_while_another_node_has_space(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.commit(b"b", b"c")
    assert [(order.node_id, order.keys) for order in cluster.step()] == [(two.node_id, [b"b", b"c"])]


@pytest.mark.usefixtures("empty_two")
def test_prompts_behind_a_shared_prefix_have_their_own_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED_CHILDREN", 2)
    cluster = Cluster(parents=[b"", b"a", b"a"])
    cluster.node("two", "y")
    cluster.commit(b"b", b"c")
    assert [order.keys for order in cluster.step()] == [[b"b", b"c"]]


@pytest.mark.usefixtures("empty_two")
def test_a_lost_copy_does_not_pause_its_receiver(cluster: Cluster) -> None:
    """A full home may evict a copy before the master looks; a pause of two seconds left a quarter of the blocks without one."""
    cluster.node("two", "y")
    cluster.commit(b"a")
    [order] = cluster.step()
    cluster.arrive(order, has_room=False)
    cluster.homes.committed(cluster.one.node_id, TENANT, [b"a"], SIZE)
    assert [again.keys for again in cluster.step()] == [[b"a"]]
    assert (cluster.homes.skipped_blocks, cluster.homes.skipped_at) == ({"failed": 1}, {cluster.one.node_id: 1})
    assert cluster.homes.take_secondary() == []


@pytest.mark.usefixtures("empty_two")
def test_blocks_gone_or_elsewhere_by_now_are_not_copied(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.commit()
    cluster.gone(cluster.one, b"a")
    cluster.node("three", "z", Event(b"b", 2))
    cluster.master.directory.replication.plan(TENANT, [b"c"], node_id=2, source_node_id=1, now_ns=0)
    assert cluster.step() == [], "a is gone, b at another node, c on its way"
    assert cluster.homes.skipped_blocks == {"gone": 1}


@pytest.mark.usefixtures("empty_two")
def test_blocks_beyond_their_homes_capacity_are_skipped(cluster: Cluster) -> None:
    cluster.node("two", "y", tier=tier_of(capacity_bytes=SIZE))  # free at first, and once more by eviction
    cluster.commit()
    assert [order.keys for order in cluster.step()] == [KEYS[:2]]
    assert cluster.homes.skipped_blocks == {"space": 1}


@pytest.mark.usefixtures("empty_two")
def test_a_copy_counts_if_the_writers_has_left(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.commit(b"a")
    [order] = cluster.step()
    cluster.arrive(order)
    cluster.gone(cluster.one, b"a")
    assert cluster.step() == []
    assert (cluster.homes.copied_blocks, cluster.homes.skipped_blocks, cluster.homes.take_secondary()) == (1, {}, [])


@pytest.mark.usefixtures("empty_two")
def test_removed_blocks_and_dead_nodes_end_their_copies(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.commit(b"a")
    [order] = cluster.step()
    cluster.master.remove(*KEYS)
    cluster.master.directory.run_due(cluster.master.now_ns)
    cluster.arrive(order)
    assert (cluster.step(), cluster.homes.take_secondary()) == ([], [])
    die(cluster.master, two)
    cluster.commit()
    assert cluster.step() == []


def test_nodes_that_take_no_blocks_are_no_homes(cluster: Cluster) -> None:
    cluster.node("drained", "z")
    cluster.master.commit(cluster.master.directory.drains.begin("drained", "peers"))
    cluster.commit()
    assert cluster.step() == []


@pytest.mark.usefixtures("empty_two")
def test_secondary_copies_are_known_while_both_exist(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    two = cluster.node("two", "y")
    cluster.move()
    monkeypatch.setattr(module, "MAX_SECONDARY", 2)
    assert list(cluster.homes.secondary) == [(TENANT, key) for key in KEYS]
    cluster.gone(cluster.one, b"b")
    cluster.gone(two, b"c")
    cluster.step()
    assert list(cluster.homes.secondary) == [(TENANT, b"a")]


def events(node: NodeMember, *keys: bytes) -> Publish:
    """The node has committed the first of these blocks and dropped the others."""
    count = len(keys)
    return Publish(
        epoch=node.epoch,
        phase=PHASE_STREAM,
        tenants=[TENANT],
        namespaces=[""],
        keys=list(keys),
        kinds=bytes([EVENT_COMMIT] + [EVENT_REMOVED] * (count - 1)),
        tenant_indexes=[0] * count,
        namespace_indexes=[0] * count,
        sizes=[SIZE] * count,
        checksums=[0] * count,
        generations=[1 + KEYS.index(key) for key in keys],
        tiers=b"\2" * count,
        parents=[b""] * count,
    )


@pytest.mark.promise("last-replica-last")
@pytest.mark.usefixtures("empty_two")
def test_the_source_is_primary_again_once_its_home_evicts(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.move()
    cluster.homes.published(two.node_id, events(two, b"a", b"b"))
    cluster.homes.published(cluster.one.node_id, events(cluster.one, b"a", b"c"))
    assert cluster.homes.take_primary() == [(cluster.one.node_id, TENANT, [b"b"])], "its copy of c is gone"
    assert cluster.homes.take_primary() == []
    assert list(cluster.homes.secondary) == [(TENANT, b"a")]


@pytest.mark.promise("last-replica-last")
@pytest.mark.usefixtures("empty_two")
@pytest.mark.parametrize("how", ["dies", "is drained", "restarts"])
def test_the_source_is_primary_again_once_its_home_is_lost(how: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKED_SECONDARY", 0)
    monkeypatch.setattr(module, "CHECKED_AFTER_LOSS", 2)
    two = cluster.node("two", "y")
    cluster.move()
    cluster.step(REFRESH_NS)
    assert cluster.homes.take_primary() == [], "nothing has happened"
    if how == "is drained":
        cluster.master.commit(cluster.master.directory.drains.begin("two", "peers"))
    else:
        die(cluster.master, two)
    if how == "restarts":
        cluster.node("two", "y", instance=2)
    cluster.step(REFRESH_NS)
    assert cluster.homes.take_primary() == [(cluster.one.node_id, TENANT, KEYS[:2])]
    cluster.step()
    assert cluster.homes.take_primary() == [(cluster.one.node_id, TENANT, KEYS[2:])]
    assert not cluster.homes.secondary


def _nodes(*free: float) -> HomeNodes:
    members = Cluster()
    for number, share in enumerate(free):
        members.node(f"n{number}", f"h{number}", tier=tier_of(capacity_bytes=1000, used_bytes=int(1000 * (1 - share))))
    live = [node for node in members.master.directory.members.live() if node is not members.one]
    return HomeNodes(live, slow_start_ns=0, now_ns=0)


def test_homes_spread_over_nodes_and_stay_when_one_leaves() -> None:
    keys = [b"prompt %d" % number for number in range(4000)]
    four, three = _nodes(0, 0, 0, 0), _nodes(0, 0, 0)
    of_four, of_three = [four.choose(key) for key in keys], [three.choose(key) for key in keys]
    last = max(of_four)
    assert all(900 < of_four.count(node_id) < 1100 for node_id in set(of_four))
    assert all(before in (after, last) for before, after in zip(of_four, of_three, strict=True))


def test_an_empty_node_gets_most_of_the_prompts() -> None:
    nodes = _nodes(0.0, 1.0)
    homes = [nodes.choose(b"prompt %d" % number) for number in range(5000)]
    assert 4600 < homes.count(max(homes)) < 4760, "16 of 17"
    assert nodes.best_of([min(homes)], b"x") == min(homes)
