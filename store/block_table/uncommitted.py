"""Uncommitted blocks: visible on the node, not yet committed to the directory. Chooses the next commit request and
keeps waiters.

A block is uncommitted from its put (generation UNCOMMITTED) until the master assigns a generation or it is evicted. It
is unsent, in flight, or deferred because another writer holds its key. A commit request covers one tenant, namespace
and partition.

Bookkeeping only; called from the node's loop.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from kvstore.rpc.tracing import MAX_LINKS, TraceSpan
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partition_map import PartitionMap

FORGET_EVERY: Final = 64
"""Waits of a tenant between two passes that drop finished ones."""

UNCOMMITTED: Final = 0
"""Generation of an uncommitted block. The master never assigns it."""

_Group = tuple[str, str, int]
"""Tenant, namespace and partition."""


def never() -> bool:
    return False


class _CommitWait(NamedTuple):
    """Wait for the tenant's blocks up to number `newest`. `is_over` returns True once the callback is no longer needed."""

    newest: int
    callback: Callable[[], None]
    is_over: Callable[[], bool]


class UncommittedBlocks:
    """Uncommitted blocks by tenant, their commit requests in flight, and waits for them."""

    def __init__(self, partition_map: PartitionMap) -> None:
        self._partition_map = partition_map
        self._numbers: dict[str, OrderedDict[Block, int]] = {}
        """By tenant: each uncommitted block and its rising number. An OrderedDict finds its first item in O(1); a dict
        with deleted items does not."""
        self._unsent: dict[_Group, dict[Block, None]] = {}
        """In the order of their puts. No empty dicts."""
        self._deferred: dict[Block, None] = {}
        self._in_flight: dict[str, set[bytes]] = {}
        """By tenant: keys with a commit request in flight, whether their blocks still exist or not. Two requests for
        one key could be answered in one order and applied in the other."""
        self._waits: dict[str, deque[_CommitWait]] = {}
        """By tenant, in the order of the awaited blocks. No empty deques."""
        self._due: list[Callable[[], None]] = []
        self.last_number = 0
        """Number of the newest block."""
        self._causes: deque[tuple[str, str | None, TraceSpan]] = deque(maxlen=MAX_LINKS + 1)
        """Latest traced requests that the next commit requests serve, with tenant and namespace (None: any)."""

    def __len__(self) -> int:
        return sum(map(len, self._numbers.values()))

    def add(self, block: Block) -> None:
        """Add a block that became visible uncommitted."""
        self.last_number += 1
        group = self._group(block)
        self._numbers.setdefault(group[0], OrderedDict())[block] = self.last_number
        self._unsent.setdefault(group, {})[block] = None

    def _group(self, block: Block) -> _Group:
        columns = block.columns
        return columns.tenant, columns.namespace, self._partition_map.of(block.key)

    def regroup(self) -> None:
        """Regroup unsent blocks after the number of partitions became known. No request has been sent before."""
        waiting = [block for blocks in self._unsent.values() for block in blocks]
        self._unsent.clear()
        for block in waiting:
            self._unsent.setdefault(self._group(block), {})[block] = None

    def add_all(self, blocks: Sequence[Block]) -> None:
        """Add blocks of one tenant."""
        if not blocks:
            return
        tenant = blocks[0].tenant
        first = self.last_number + 1
        self.last_number += len(blocks)
        self._numbers.setdefault(tenant, OrderedDict()).update(zip(blocks, range(first, first + len(blocks)), strict=True))
        names = {columns.namespace for columns in set(map(attrgetter("columns"), blocks))}
        for namespace in names:
            mine = blocks if len(names) == 1 else [block for block in blocks if block.namespace == namespace]
            for partition, of_one in self._partition_map.group(mine).items():
                self._unsent.setdefault((tenant, namespace, partition), {}).update(dict.fromkeys(of_one))

    def remove(self, block: Block) -> None:
        """Remove a block that was committed or evicted."""
        tenant = block.tenant
        of_tenant = self._numbers[tenant]
        del of_tenant[block]
        if not of_tenant:
            del self._numbers[tenant]
        if self._deferred:
            self._deferred.pop(block, None)
        if self._unsent:
            group = self._group(block)
            waiting = self._unsent.get(group)
            if waiting is not None and block in waiting:
                del waiting[block]
                if not waiting:
                    del self._unsent[group]
        if tenant in self._waits:
            self._end_waits(tenant)

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Remove different blocks of one tenant and namespace."""
        tenant, namespace = blocks[0].tenant, blocks[0].namespace
        waiting = (self._unsent.get((tenant, namespace, partition)) for partition in range(self._partition_map.count))
        if self._deferred or not all(group is None or group.keys().isdisjoint(blocks) for group in waiting):
            for block in blocks:
                self.remove(block)
            return
        of_tenant = self._numbers[tenant]
        for block in blocks:
            del of_tenant[block]
        if not of_tenant:
            del self._numbers[tenant]
        if tenant in self._waits:
            self._end_waits(tenant)

    def _end_waits(self, tenant: str) -> None:
        """Make callbacks due whose blocks are all committed or evicted."""
        waits, numbers = self._waits[tenant], self._numbers.get(tenant)
        oldest = next(iter(numbers.values())) if numbers else self.last_number + 1
        while waits and waits[0].newest < oldest:
            self._due.append(waits.popleft().callback)
        if not waits:
            del self._waits[tenant]

    def when_committed(self, tenant: str, callback: Callable[[], None], *, is_over: Callable[[], bool] = never) -> None:
        """Make the callback due once every block of the tenant that is uncommitted now no longer is. It may be dropped
        if `is_over` returns True by then."""
        if tenant not in self._numbers:
            self._due.append(callback)
            return
        waits = self._waits.setdefault(tenant, deque())
        waits.append(_CommitWait(self.last_number, callback, is_over))
        if len(waits) % FORGET_EVERY == 0:
            self._waits[tenant] = deque(wait for wait in waits if not wait.is_over())

    def take_due(self) -> list[Callable[[], None]]:
        """Return and clear due callbacks. They are not called on removal, which may happen during an eviction."""
        due, self._due = self._due, []
        return due

    @property
    def is_awaited(self) -> bool:
        """True if a caller waits for commits."""
        return bool(self._waits)

    # --- commit requests ---

    @property
    def has_unsent(self) -> bool:
        """True if `take` may return blocks."""
        return bool(self._unsent)

    def partitions(self) -> set[int]:
        """Partitions with unsent blocks."""
        return {partition for _tenant, _namespace, partition in self._unsent}

    def take(self, max_blocks: int, partition: int = 0) -> list[Block]:
        """Return the blocks of the next commit request of the partition, all of one group, and mark them in flight.
        Empty if none is unsent."""
        for group, waiting in self._unsent.items():
            if group[2] != partition:
                continue
            claimed = self._in_flight.get(group[0], ())
            taken = list(islice((block for block in waiting if block.key not in claimed) if claimed else waiting, max_blocks))
            if taken:
                if len(taken) == len(waiting):
                    del self._unsent[group]
                else:
                    for block in taken:
                        del waiting[block]
                self.begin(taken)
                return taken
        return []

    def note_cause(self, tenant: str, namespace: str | None, span: TraceSpan | None) -> None:
        """Record a traced request that put blocks of the namespace, or waits for all of the tenant's (None). No-op
        without a span."""
        if span is not None:
            self._causes.append((tenant, namespace, span))

    def take_causes(self, block: Block) -> list[TraceSpan]:
        """Return the traced requests that a commit request of the block's tenant and namespace serves, each once."""
        if not self._causes:
            return []
        left, found = list[tuple[str, str | None, TraceSpan]](), list[TraceSpan]()
        for cause in self._causes:
            tenant, namespace, span = cause
            if tenant == block.tenant and namespace in (None, block.namespace):
                found.append(span)
            else:
                left.append(cause)
        self._causes.clear()
        self._causes.extend(left)
        return found

    @property
    def commits_in_flight(self) -> int:
        """Number of keys with a commit request in flight."""
        return sum(map(len, self._in_flight.values()))

    def is_commit_in_flight(self, tenant: str, key: bytes) -> bool:
        """Return True if a commit request of the key is in flight."""
        return key in self._in_flight.get(tenant, ())

    def begin(self, blocks: Sequence[Block]) -> None:
        """Mark keys of one tenant as in flight: no second request begins."""
        if blocks:
            self._in_flight.setdefault(blocks[0].tenant, set()).update([block.key for block in blocks])

    def end(self, blocks: Sequence[Block]) -> None:
        """Unmark keys whose request was answered, or never will be."""
        claimed = self._in_flight.get(blocks[0].tenant) if blocks else None
        if claimed is not None:
            claimed.difference_update([block.key for block in blocks])
            if not claimed:
                del self._in_flight[blocks[0].tenant]

    def defer(self, blocks: Iterable[Block]) -> None:
        """Keep blocks that were not committed for `retry_deferred`. Evicted ones are dropped."""
        self._deferred.update((block, None) for block in blocks if not block.is_dropped)

    def retry_deferred(self) -> None:
        """Make deferred blocks unsent again."""
        for block in self._deferred:
            self._unsent.setdefault(self._group(block), {})[block] = None
        self._deferred.clear()

    def blocks(self) -> Iterator[Block]:
        """Iterate over all uncommitted blocks. The table must not change meanwhile."""
        for of_tenant in self._numbers.values():
            yield from of_tenant
