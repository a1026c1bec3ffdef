"""Home copies: blocks that a nearly full node commits are copied to their home node, so that the memory of all nodes
is one pool. Sans-I/O; `now_ns` is passed in.

A put stays at the writer's node. While that node is nearly full, each block that it commits has a home:

- the node that holds the block's parent, so that one eviction order knows the whole prompt;
- for the first block of a prompt, and for one behind a shared prefix: a node chosen by weighted rendezvous hashing.

While any node has free space, a block does not stay at a nearly full one. If the home is another node, it fetches a
copy and evicts as for a put. Then the writer's copy is *secondary*, and is evicted first.
So the home's eviction policy decides when a block leaves the cluster, and a victim moves at most once.

If the copy at the home is gone first (evicted, or the home died or is drained), the writer's copy is primary again.
The home reports an eviction. After the loss of a node, `step` checks all secondary copies, some at a time.

With several partitions a master knows few parents. The node names with each block the group of its prompt, and all
masters choose the home of the group, as far as their nodes' weights are equal (store/block_table/prompt_groups.py).

Rendezvous hashing sends a prompt that was evicted and is stored again to its former home, which remembers it.
Source: Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, IEEE/ACM Transactions on Networking
1998; weights as in Schindelhauer and Schomaker, Weighted Distributed Hash Tables, SPAA 2005."""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.lineage import NO_PARENT
from kvstore.master.directory.index.tenants import Tenant
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.copies import CHECK_COST, CopyBatcher, CopyLimits, CopyOrder
from kvstore.master.directory.placement.placement import ramp
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_REMOVED, PHASE_STREAM, Publish
from kvstore.protocol.node_states import ALIVE
from kvstore.protocol.partitions import PROMPT_BYTES, SHARED_CHILDREN


class HomeCopy(NamedTuple):
    """The home node of a block, and the node whose copy is secondary."""

    node_id: int
    source_node_id: int


SHORT_SHARE: Final = 0.1
"""A node is nearly full while less than this share of its tiers is free. Blocks committed meanwhile have a copy at
home before the node is full."""
FREE_WEIGHT: Final = 15.0
"""An empty node gets this much more of the new prompts than a full one, relative to its capacity."""
REFRESH_NS: Final = 1_000_000_000
"""Interval at which the nodes' weights are computed: that of heartbeats."""
MAX_QUEUED: Final = 1 << 16
"""Committed blocks that wait for a copy; further ones get none."""
MAX_SECONDARY: Final = 1 << 18
"""Known secondary copies, the newest ones: of older ones the generation selects the keeper. About 60 MB."""
CHECKED_SECONDARY: Final = 64
"""Secondary copies that a step checks for being there still."""
SKIPPED: Final = ("queue", "gone", "space", "failed")
"""Why a block has no home copy: MAX_QUEUED blocks waited; it had left the writer's node before its turn, as blocks do
beyond `bytes_per_s`; its home had no space; the copy did not arrive, or has left the home already."""
CHECKED_AFTER_LOSS: Final = 2048
"""The same after a node left or restarted, until all have been checked. About 3 ms."""
_ANY_FREE_SHARE: Final = -1.0
"""Receivers evict for home copies; a node's capacity bounds what is under way to it."""
_NO_PAUSE_NS: Final = 0
"""A home that has evicted a copy before this master looked is not full."""
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class HomeNodes:
    """Nodes that can be the home of blocks, with their weights. Recomputed every REFRESH_NS."""

    def __init__(self, nodes: Sequence[NodeMember], *, slow_start_ns: int, now_ns: int) -> None:
        accepting = [node for node in nodes if node.takes_blocks and node.state == ALIVE and node.capacity_bytes]
        self.ids = {node.node_id: at for at, node in enumerate(accepting)}
        self.registrations = {(node.node_id, node.epoch) for node in accepting}
        self._free = [node.node_id for node in accepting if not is_short(node)]
        self._of = [node.node_id for node in accepting]
        self._salts: npt.NDArray[np.uint64] = np.array([xxhash.xxh3_64_intdigest(node.info.name.encode()) for node in accepting], np.uint64)
        self._weights = np.array([_weight(node) * ramp(node, slow_start_ns, now_ns) for node in accepting])

    def __len__(self) -> int:
        return len(self._of)

    def choose(self, key: bytes) -> int:
        """Return the home of a prompt that begins with `key`."""
        return self._of[int(self._scores(key).argmax())]

    def instead(self, node_id: int, key: bytes) -> int:
        """Return the home of a block that would stay at this nearly full node: one with free space, if any has."""
        return self.best_of(self._free, key) if self._free else node_id

    def best_of(self, node_ids: Sequence[int], key: bytes) -> int:
        """Return the one of these nodes, which are all known, that `choose` would prefer."""
        if len(node_ids) == 1:
            return node_ids[0]
        scores = self._scores(key)
        return max(node_ids, key=lambda node_id: float(scores[self.ids[node_id]]))

    def _scores(self, key: bytes) -> npt.NDArray[np.float64]:
        mixed = self._salts ^ np.uint64(xxhash.xxh3_64_intdigest(key))
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
        mixed ^= mixed >> np.uint64(31)
        uniform = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
        return np.asarray(np.log(uniform) / self._weights, np.float64)


class _Committed(NamedTuple):
    """Blocks that a node has committed, those before `begin` done."""

    node_id: int
    tenant: str
    keys: Sequence[bytes]
    prompts: bytes = b""
    """PROMPT_BYTES for each key, or none."""
    begin: int = 0


class HomeCopies:
    """Committed blocks that wait for a copy, copies under way, and secondary copies. Not thread-safe."""

    def __init__(
        self,
        parts: DirectoryParts,
        replication: ReplicaPlanner,
        secondary: OrderedDict[tuple[str, bytes], HomeCopy],
        pace: CopyLimits,
        *,
        bytes_per_s: int,
        slow_start_ns: int,
    ) -> None:
        """`bytes_per_s` bounds the copies of all nodes together; 0 turns home copies off. `secondary` is filled here,
        and read by LastReplicas."""
        self._rows, self._tenants, self._members, self._replication = parts.rows, parts.tenants, parts.members, replication
        self._batcher = CopyBatcher(parts, replication, pace, full_share=_ANY_FREE_SHARE, refused_ns=_NO_PAUSE_NS)
        self._bytes_per_s, self._slow_start_ns = bytes_per_s, slow_start_ns
        self.secondary = secondary
        self._nodes = HomeNodes((), slow_start_ns=slow_start_ns, now_ns=0)
        self._short: set[int] = set()
        """Nearly full nodes."""
        self._left_at: dict[int, float] = {}
        """Bytes that other nodes may commit until they are nearly full: heartbeats come once a second, and a writer
        fills a small node sooner."""
        self._refreshed_ns: int | None = None
        self._stepped_ns = 0
        self._left_bytes = 0.0
        """Bytes that may be copied now; refilled at `bytes_per_s`."""
        self._queue: deque[_Committed] = deque()
        self._queued = 0
        self._checked = 0
        """Blocks examined in this step, also those that have left: a full queue of these took 80 ms."""
        self._under_way: dict[tuple[str, bytes], HomeCopy] = {}
        self._arrived: dict[tuple[int, str], list[bytes]] = {}
        self._returned: dict[tuple[int, str], list[bytes]] = {}
        """Copies that are primary again, as `_arrived`."""
        self._checks_due = 0
        """Secondary copies that were known when a node left, and are not checked yet."""
        self.copied_blocks = 0
        """Since this master owns the catalog, as `copied_bytes` and those below."""
        self.copied_bytes = 0
        self.skipped_blocks: Counter[str] = Counter()
        """Blocks without a home copy, by one of SKIPPED."""
        self.skipped_at: Counter[int] = Counter()
        """The same by the writer's node."""

    def heartbeat(self, node: NodeMember) -> None:
        """The node has reported how much of its tiers is used."""
        self._left_at[node.node_id] = node.free_bytes - SHORT_SHARE * node.capacity_bytes
        if is_short(node):
            self._short.add(node.node_id)
        else:
            self._short.discard(node.node_id)

    def committed(self, node_id: int, tenant: str, keys: Sequence[bytes], size_bytes: int, prompts: bytes = b"") -> None:
        """The node has committed these blocks, of `size_bytes` together, in the order of their prompts, which are named
        by PROMPT_BYTES for each block, or not at all."""
        if node_id not in self._short:
            left = self._left_at[node_id] = self._left_at.get(node_id, 0.0) - size_bytes
            if left >= 0:
                return
            self._short.add(node_id)
        if len(self._nodes) < 2 or not keys:
            return
        if self._queued + len(keys) > MAX_QUEUED:
            self._skip(node_id, "queue", len(keys))
            return
        self._queued += len(keys)
        self._queue.append(_Committed(node_id, tenant, keys, prompts))

    @property
    def is_pending(self) -> bool:
        """True if a step has something to do: blocks wait, or copies are under way."""
        return bool(self._queue or self._under_way or self._returned)

    def published(self, node_id: int, message: Publish) -> None:
        """As `committed`, for the commits among the events of a node. Also note copies that have left the node."""
        if message.phase != PHASE_STREAM:
            return
        if self.secondary and EVENT_REMOVED in message.kinds:
            self._removed(node_id, message)
        if EVENT_COMMIT not in message.kinds:
            return
        commits: dict[int, list[int]] = {}
        for at, (kind, tenant) in enumerate(zip(message.kinds, message.tenant_indexes, strict=True)):
            if kind == EVENT_COMMIT:
                commits.setdefault(tenant, []).append(at)
        for tenant, found in commits.items():
            keys, size_bytes = [message.keys[at] for at in found], sum(message.sizes[at] for at in found)
            prompts = b"".join([message.prompts[at * PROMPT_BYTES : (at + 1) * PROMPT_BYTES] for at in found])
            self.committed(node_id, message.tenants[tenant], keys, size_bytes, prompts)

    def step(self, now_ns: int) -> list[CopyOrder]:
        """Order the next copies."""
        if not self._bytes_per_s:
            return []
        if self._refreshed_ns is None or now_ns >= self._refreshed_ns + REFRESH_NS:
            former, self._nodes = self._nodes, HomeNodes(self._members.live(), slow_start_ns=self._slow_start_ns, now_ns=now_ns)
            self._refreshed_ns = now_ns
            if former.registrations - self._nodes.registrations:
                self._checks_due = len(self.secondary)
        self._left_bytes = min(self._bytes_per_s, self._left_bytes + self._bytes_per_s * (now_ns - self._stepped_ns) / 1e9)
        self._stepped_ns = now_ns
        for block_id in self._batcher.begin(now_ns):
            self._ended(block_id)
        self._drop_stale()
        homes: dict[int, int] = {}
        self._checked = 0
        while self._queue and not self._is_limited:
            committed = self._queue.popleft()
            end = self._order(committed, homes)
            self._queued -= end - committed.begin
            if end < len(committed.keys):
                self._queue.appendleft(committed._replace(begin=end))
        return self._batcher.take_orders()

    def take_secondary(self) -> list[tuple[int, str, list[bytes]]]:
        """Return and clear (node id, tenant, keys) of copies that are secondary since the last call."""
        arrived, self._arrived = self._arrived, {}
        return [(node_id, tenant, keys) for (node_id, tenant), keys in arrived.items()]

    def take_primary(self) -> list[tuple[int, str, list[bytes]]]:
        """As `take_secondary`, of copies that are secondary no more: their home has none."""
        returned, self._returned = self._returned, {}
        return [(node_id, tenant, keys) for (node_id, tenant), keys in returned.items()]

    @property
    def _is_limited(self) -> bool:
        return self._batcher.is_busy or self._left_bytes <= 0 or self._checked * CHECK_COST >= self._batcher.pace.rows

    def _order(self, committed: _Committed, homes: dict[int, int]) -> int:
        """Order copies of the blocks, within the limits; return the index of the first block left. `homes` are the homes
        of rows that were chosen in this step."""
        source, tenant, keys, prompts, begin = committed
        owner = self._tenants.get(tenant)
        if owner is None or source not in self._nodes.ids:
            return len(keys)
        for at in range(begin, len(keys)):
            if self._is_limited:
                return at
            self._checked += 1
            row = owner.rows.get(keys[at], NO_ROW)
            if row == NO_ROW:
                self._skip(source, "gone")
                continue
            holders = {node_id for node_id, state in self._rows.pairs(row) if not state & HINT}
            if source not in holders:
                self._skip(source, "gone")
                continue
            if (tenant, keys[at]) in self._under_way or self._replication.is_ordered(tenant, keys[at]):
                continue  # also if this step has added it: blocks that were stored again wait twice
            if len(holders) > 1:
                others = [node_id for node_id in holders if node_id != source and node_id in self._nodes.ids]
                homes[row] = self._nodes.best_of(others or [source], keys[at])
                continue
            prompt = prompts[at * PROMPT_BYTES : (at + 1) * PROMPT_BYTES]
            home = self._nodes.choose(prompt) if prompt else self._home(owner, row, source, homes)
            if home == source:
                home = self._nodes.instead(source, prompt or keys[at])
            homes[row] = home
            size_bytes = self._rows.sizes[row]
            if home == source:
                continue
            if self._batcher.room.get(home, 0) < size_bytes or len(self._under_way) >= MAX_QUEUED:
                self._skip(source, "space")
                continue
            self._left_bytes -= size_bytes
            self._under_way[tenant, keys[at]] = HomeCopy(home, source)
            self._batcher.add(tenant, keys[at], size_bytes, node_id=home, source_node_id=source)
        return len(keys)

    def _home(self, owner: Tenant, row: int, source: int, homes: dict[int, int]) -> int:
        parent, key = self._rows.parents[row], self._rows.keys[row]
        if parent == NO_PARENT or self._rows.children[parent] >= SHARED_CHILDREN:
            return self._nodes.choose(key)
        if parent in homes:
            return homes[parent]
        receivers = [node_id for node_id in self._replication.receivers(owner.name, self._rows.keys[parent]) if node_id in self._nodes.ids]
        holders = receivers or self._holders(parent)
        if not holders:
            return self._nodes.choose(key)
        return self._nodes.best_of([node_id for node_id in holders if node_id != source] or holders, key)

    def _holders(self, row: int) -> list[int]:
        """Return the nodes of `HomeNodes` at which the block is known to be."""
        return [node_id for node_id, state in self._rows.pairs(row) if not state & HINT and node_id in self._nodes.ids]

    def _ended(self, block_id: tuple[str, bytes]) -> None:
        """A copy has arrived, or failed."""
        copy, owner = self._under_way.pop(block_id), self._tenants.get(block_id[0])
        row = owner.rows.get(block_id[1], NO_ROW) if owner is not None else NO_ROW
        holders = dict(self._rows.pairs(row))
        if owner is None or copy.node_id not in holders:
            self._skip(copy.source_node_id, "failed")
            return
        self.copied_blocks += 1
        self.copied_bytes += self._rows.sizes[row]
        if copy.source_node_id not in holders or owner.targets.get(block_id[1], 1) > 1:
            return  # the writer's copy has left, or both are replicas that the writer asked for
        self.secondary.pop(block_id, None)
        if len(self.secondary) >= MAX_SECONDARY:
            self.secondary.popitem(last=False)
        self.secondary[block_id] = copy
        self._arrived.setdefault((copy.source_node_id, block_id[0]), []).append(block_id[1])

    def _skip(self, node_id: int, reason: str, blocks: int = 1) -> None:
        self.skipped_blocks[reason] += blocks
        self.skipped_at[node_id] += blocks

    def _removed(self, node_id: int, message: Publish) -> None:
        """The node has dropped blocks."""
        for key, kind, tenant in zip(message.keys, message.kinds, message.tenant_indexes, strict=True):
            if kind != EVENT_REMOVED:
                continue
            block_id = message.tenants[tenant], key
            copy = self.secondary.get(block_id)
            if copy is not None and node_id in copy:
                del self.secondary[block_id]
                if node_id == copy.node_id:
                    self._returned.setdefault((copy.source_node_id, block_id[0]), []).append(key)

    def _drop_stale(self) -> None:
        """Drop secondary copies that are gone at their source, and those whose home is lost: these are primary again."""
        count = min(CHECKED_AFTER_LOSS if self._checks_due else CHECKED_SECONDARY, len(self.secondary))
        self._checks_due = max(0, self._checks_due - count)
        for _ in range(count):
            block_id, copy = self.secondary.popitem(last=False)
            owner = self._tenants.get(block_id[0])
            holders = dict(self._rows.pairs(owner.rows.get(block_id[1], NO_ROW))) if owner is not None else {}
            if copy.source_node_id not in holders:
                continue
            if copy.node_id in holders and copy.node_id in self._nodes.ids:
                self.secondary[block_id] = copy  # to the end of the queue
            else:
                self._returned.setdefault((copy.source_node_id, block_id[0]), []).append(block_id[1])


def is_short(node: NodeMember) -> bool:
    """Return True if the node is nearly full."""
    return node.free_bytes < SHORT_SHARE * node.capacity_bytes


def _weight(node: NodeMember) -> float:
    free_share = min(1.0, max(0.0, node.free_bytes / node.capacity_bytes))
    return node.capacity_bytes * (1 + FREE_WEIGHT * free_share)
