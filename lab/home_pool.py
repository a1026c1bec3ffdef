"""Replay of prompts through several full nodes whose memory is one pool by home copies.

Each prompt is read and stored at one node. A stored block gets a copy at its home after `lag_s`; then its copy at the writer is secondary
and leaves first. So the home's policy decides when the block leaves the cluster. Rules of the live cluster:

- home: master/directory/placement/home_copies.py. A node copies while it is nearly full; blocks stored before are at home where they are.
- secondary copies: store/block_table/eviction_order.py.
- exchange of what the policies learn: store/block_table/shared_reuse.py.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log
from random import Random
from typing import Final

import xxhash

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab.replay import check_capacity
from kvstore.lab.tiers import TwoTiers
from kvstore.protocol.errors import InvalidArgument
from kvstore.tiers.policies.by_name import make_family
from kvstore.tiers.policies.prefix.visits import CLASSES
from kvstore.tiers.policies.reuse_statistics import ReuseStatistics

MAX_NODES: Final = 64
SHORT_SHARE: Final = 0.1
SHARED_CHILDREN: Final = 4
FREE_WEIGHT: Final = 15.0
"""The three are the master's."""
EXCHANGE_S: Final = 10.0
"""Interval at which a node reports what its policy has learned, and receives the sum of the others."""


@dataclass(slots=True)
class HomePoolCounts:
    """Counters of a replay so far."""

    blocks: int = 0
    prefix_hits: int = 0
    """Blocks before a prompt's first miss that any node had."""
    local_hits: int = 0
    """Of these, those that the prompt's own node had."""
    copies: int = 0
    """Blocks copied to their home."""

    @property
    def prefix_hit_ratio(self) -> float:
        return self.prefix_hits / self.blocks if self.blocks else 0.0

    @property
    def local_share(self) -> float:
        return self.local_hits / self.prefix_hits if self.prefix_hits else 0.0

    @property
    def copies_per_hit(self) -> float:
        return self.copies / self.prefix_hits if self.prefix_hits else 0.0


@dataclass(frozen=True, slots=True)
class HomePoolOptions:
    """Behaviour of a pool besides its sizes."""

    shares: Sequence[float]
    """Share of the prompts at each node, in any unit. At least one is above 0."""
    is_routed: bool = False
    """Prompts go to the node that holds most of their beginning, as by Algorithm 1 without load. A prompt of which no node holds two
    blocks goes by `shares`."""
    is_shared: bool = True
    """Policies exchange what they learn."""
    lag_s: float = 1.0
    """Time of a copy, 0 or more."""
    seed: int = 1


class _OneTier:
    """A tier: its policy, and the blocks of which it has a secondary copy, the one read longest ago first."""

    def __init__(self, policy: str, capacity: int, clock: Callable[[], float], on_left: Callable[[int], None]) -> None:
        self.family = make_family(policy, clock=clock)
        self._policy = self.family.policy(1)
        self._capacity = capacity
        self._on_left = on_left
        self._resident: set[int] = set()
        self._secondary: OrderedDict[int, None] = OrderedDict()

    def holds(self, block: int) -> bool:
        return block in self._resident

    @property
    def used_blocks(self) -> int:
        return len(self._resident)

    def read(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._policy.touch(block)
            if block in self._secondary:
                self._secondary.move_to_end(block)

    def make_room(self, count: int) -> None:
        for _ in range(len(self._resident) + count - self._capacity):
            if self._secondary:
                victim, _ = self._secondary.popitem(last=False)
                self._policy.release(victim)
            else:
                found = self._policy.victim()
                assert found is not None, "the policy has keys but returned no victim"
                victim = int(found)
                self._policy.remove(victim)
            self._resident.remove(victim)
            self._on_left(victim)

    def add(self, block: int, parent: int | None) -> None:
        self._policy.insert(block, parent)
        self._resident.add(block)

    def settle(self) -> None:
        """Nothing waits for the end of a put."""

    def mark_secondary(self, block: int) -> None:
        self._secondary[block] = None


class _Node:
    """A node: its tiers, and what it last reported of its policy."""

    def __init__(self, pool: "HomePool", policy: str, index: int, sizes: tuple[int, int]) -> None:
        def clock() -> float:
            return pool.now_s

        def on_left(block: int) -> None:
            pool.left(self, block)

        dram_blocks, nvme_blocks = sizes
        self.index = index
        self.tiers: _OneTier | TwoTiers
        if nvme_blocks:
            self.tiers = TwoTiers(policy, dram_blocks=dram_blocks, nvme_blocks=nvme_blocks, clock=clock, on_left=on_left)
        else:
            self.tiers = _OneTier(policy, dram_blocks, clock, on_left)
        self.family = self.tiers.family
        self.reported = ReuseStatistics.none(CLASSES)
        self.reported_s = -EXCHANGE_S

    @property
    def used_blocks(self) -> int:
        return self.tiers.used_blocks


class HomePool:
    """Replay through initially empty nodes, one for each share. `counts` may be read at any time."""

    def __init__(self, policy: str, node_blocks: int, options: HomePoolOptions, *, nvme_blocks: int = 0) -> None:
        """Each node has DRAM for `node_blocks`, and NVMe for `nvme_blocks` below it unless that is 0. Raises ConfigError for
        an unknown policy, InvalidArgument for other values out of range."""
        if not 1 <= len(options.shares) <= MAX_NODES or min(options.shares) < 0 or not sum(options.shares):
            raise InvalidArgument(f"shares of the prompts are {list(options.shares)}: 1 to {MAX_NODES} numbers, not negative, some above 0")
        if options.lag_s < 0:
            raise InvalidArgument(f"the lag of a copy is {options.lag_s} s: it must not be negative")
        check_capacity(node_blocks)
        self.counts = HomePoolCounts()
        self.now_s = 0.0
        self._options, self._at_once, self._capacity = options, node_blocks, node_blocks + nvme_blocks
        self._nodes = [_Node(self, policy, index, (node_blocks, nvme_blocks)) for index in range(len(options.shares))]
        self._holders: dict[int, list[_Node]] = {}
        """Nodes that hold a block, in order of arrival. No empty lists."""
        self._parents: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        self._homes: dict[int, _Node] = {}
        self._copies: deque[tuple[float, _Node, int]] = deque()
        """Copies under way: time of arrival, source, block."""
        self._random = Random(options.seed)

    def run(self, requests: Iterable[TraceRequest]) -> HomePoolCounts:
        """Replay all requests in order, and return the counts."""
        for request in requests:
            self.request(request)
        return self.counts

    def request(self, request: TraceRequest) -> None:
        """Replay one prompt at its timestamp, or its predecessor's if that is later."""
        self.now_s = max(self.now_s, request.timestamp_ms / 1000)
        self._finish_copies()
        if self._options.is_shared:
            self._exchange()
        blocks, holders = request.hash_ids, self._holders
        node = self._choose(blocks)
        found = [block in holders for block in blocks]
        lead = found.index(False) if False in found else len(found)
        self.counts.blocks += len(found)
        self.counts.prefix_hits += lead
        self.counts.local_hits += sum(node.tiers.holds(block) for block in blocks[:lead])
        reads: dict[_Node, list[int]] = {}
        for block, is_there in zip(blocks, found, strict=True):
            if is_there:
                reads.setdefault(self._reader(node, block), []).append(block)
        for reader, read in reads.items():
            reader.tiers.read(read)
        if lead < len(found):
            self._store(node, blocks, found)

    def _choose(self, blocks: Sequence[int]) -> _Node:
        if self._options.is_routed:
            held = dict.fromkeys(self._nodes, 0)
            for block in blocks:
                if block not in self._holders:
                    break
                for holder in self._holders[block]:
                    held[holder] += 1
            best = max(self._nodes, key=held.__getitem__)
            if held[best] > 1:
                return best
        return self._random.choices(self._nodes, self._options.shares)[0]

    def left(self, node: _Node, block: int) -> None:
        """The block has left the node."""
        holders = self._holders[block]
        holders.remove(node)
        if not holders:
            del self._holders[block]

    def _reader(self, node: _Node, block: int) -> _Node:
        """Return the node at which a prompt of `node` reads a present block: its own, else the home, else another."""
        holders = self._holders[block]
        if node in holders:
            return node
        home = self._homes[block]
        return home if home in holders else holders[0]

    def _store(self, node: _Node, blocks: Sequence[int], found: Sequence[bool]) -> None:
        missing: dict[int, int | None] = {}
        for block, parent, is_there in zip(blocks, (None, *blocks), found, strict=False):
            if not is_there:
                missing.setdefault(block, parent)
        pending = list(missing.items())
        for start in range(0, len(pending), self._at_once):
            part = pending[start : start + self._at_once]
            is_short = self._is_short(node, len(part))
            node.tiers.make_room(len(part))
            for block, parent in part:
                if block not in self._parents and parent is not None:
                    self._children[parent] = self._children.get(parent, 0) + 1
                self._parents[block] = parent
                home = self._home(node, block, parent) if is_short else self._homes.setdefault(block, node)
                self._add(node, block)
                if home is not node:
                    self._copies.append((self.now_s + self._options.lag_s, node, block))
            node.tiers.settle()

    def _is_short(self, node: _Node, count: int = 0) -> bool:
        """Return True if the node is nearly full with `count` more blocks."""
        return node.used_blocks + count > (1 - SHORT_SHARE) * self._capacity

    def _home(self, source: _Node, block: int, parent: int | None) -> _Node:
        """Return the home of a block that a nearly full node stores: its parent's, unless a prompt begins with it. While
        other nodes have space it is one of them."""
        if block not in self._homes:
            begins = parent is None or parent not in self._homes or self._children[parent] > SHARED_CHILDREN
            home = self._best_of(self._nodes, block) if begins else self._homes[parent]  # type: ignore[index]
            spacious = [node for node in self._nodes if not self._is_short(node)] if home is source else []
            self._homes[block] = self._best_of(spacious, block) if spacious else home
        return self._homes[block]

    def _best_of(self, nodes: Sequence[_Node], block: int) -> _Node:
        """Choose by weighted rendezvous hashing. Nodes with free space get more."""

        def score(node: _Node) -> float:
            uniform = (xxhash.xxh3_64_intdigest(b"%d %d" % (node.index, block)) + 1) / 2**64
            return log(uniform) / (1 + FREE_WEIGHT * (1 - node.used_blocks / self._capacity))

        return max(nodes, key=score)

    def _finish_copies(self) -> None:
        while self._copies and self._copies[0][0] <= self.now_s:
            _, source, block = self._copies.popleft()
            home = self._homes[block]
            if not source.tiers.holds(block) or home.tiers.holds(block):
                continue
            home.tiers.make_room(1)
            self._add(home, block)
            home.tiers.settle()
            source.tiers.mark_secondary(block)
            self.counts.copies += 1

    def _add(self, node: _Node, block: int) -> None:
        node.tiers.add(block, self._parents[block])
        self._holders.setdefault(block, []).append(node)

    def _exchange(self) -> None:
        """Exchange statistics at the nodes whose time it is."""
        for node in self._nodes:
            if self.now_s - node.reported_s < EXCHANGE_S:
                continue
            node.reported_s = self.now_s
            own = node.family.reuse_statistics()
            if own is None:
                return
            node.reported = own.limited()
            others = ReuseStatistics.none(CLASSES)
            for other in self._nodes:
                if other is not node:
                    others += other.reported
            if len(self._nodes) > 1:
                node.family.use_statistics_of_others(others)
