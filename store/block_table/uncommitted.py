"""Blocks that are visible here and that the master has not decided about: which to claim next, and who waits for all of them.

What is claimed in one message belongs to one tenant, namespace and partition of the key space.

A block is undecided from its put (generation UNDECIDED) until the master grants it a generation, or it leaves the node. It is in one of
three states: to be claimed, claimed, or put off because another writer is at its key. Bookkeeping only; the node's loop is the only caller.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from kvstore.rpc.tracing import MAX_LINKS, TraceSpan
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.partitioning import Partitioning

SPARE: Final = 64
"""Waits whose request has been answered meanwhile are forgotten each time that a tenant has another so many."""

UNDECIDED: Final = 0
"""The generation of a block that the master has not decided about: it grants none of that number."""

_Group = tuple[str, str, int]
"""Tenant, namespace and partition."""


def never() -> bool:
    return False


class _CommitWait(NamedTuple):
    """For the blocks of a tenant up to the one that was put as `newest`. The callback is needed no more once `is_over` returns True."""

    newest: int
    callback: Callable[[], None]
    is_over: Callable[[], bool]


class UncommittedBlocks:
    """See the module."""

    def __init__(self, partitioning: Partitioning) -> None:
        self._partitioning = partitioning
        self._numbers: dict[str, OrderedDict[Block, int]] = {}
        """By tenant, every undecided block and the number it was put as, rising: the first is found at once, which it is not in a dict."""
        self._to_claim: dict[_Group, dict[Block, None]] = {}
        """In the order of their puts. None of them empty."""
        self._put_off: dict[Block, None] = {}
        self._claimed: dict[str, set[bytes]] = {}
        """By tenant, keys about which a claim is under way, whether their blocks are here still or not: two claims of one key could be
        decided one way and carried out the other."""
        self._waits: dict[str, deque[_CommitWait]] = {}
        """By tenant, in the order of the blocks that are waited for. None of them empty."""
        self._due: list[Callable[[], None]] = []
        self.last_number = 0
        """Of the newest block."""
        self._causes: deque[tuple[str, str | None, TraceSpan]] = deque(maxlen=MAX_LINKS + 1)
        """Traced requests that the next claims are for, with tenant and namespace; None: whatever it is. The latest ones."""

    def __len__(self) -> int:
        return sum(map(len, self._numbers.values()))

    def add(self, block: Block) -> None:
        """The block has become visible, undecided."""
        self.last_number += 1
        group = self._group(block)
        self._numbers.setdefault(group[0], OrderedDict())[block] = self.last_number
        self._to_claim.setdefault(group, {})[block] = None

    def _group(self, block: Block) -> _Group:
        columns = block.columns
        return columns.tenant, columns.namespace, self._partitioning.of(block.key)

    def regroup(self) -> None:
        """Other partitions are told of from now on: of a node that has said nothing to any master yet."""
        waiting = [block for blocks in self._to_claim.values() for block in blocks]
        self._to_claim.clear()
        for block in waiting:
            self._to_claim.setdefault(self._group(block), {})[block] = None

    def add_all(self, blocks: Sequence[Block]) -> None:
        """As `add`, of blocks of one tenant."""
        if not blocks:
            return
        tenant = blocks[0].tenant
        first = self.last_number + 1
        self.last_number += len(blocks)
        self._numbers.setdefault(tenant, OrderedDict()).update(zip(blocks, range(first, first + len(blocks)), strict=True))
        names = {columns.namespace for columns in set(map(attrgetter("columns"), blocks))}
        for namespace in names:
            mine = blocks if len(names) == 1 else [block for block in blocks if block.namespace == namespace]
            for partition, of_one in self._partitioning.group(mine).items():
                self._to_claim.setdefault((tenant, namespace, partition), {}).update(dict.fromkeys(of_one))

    def remove(self, block: Block) -> None:
        """It has been decided about, or is gone."""
        tenant = block.tenant
        of_tenant = self._numbers[tenant]
        del of_tenant[block]
        if not of_tenant:
            del self._numbers[tenant]
        if self._put_off:
            self._put_off.pop(block, None)
        if self._to_claim:
            group = self._group(block)
            waiting = self._to_claim.get(group)
            if waiting is not None and block in waiting:
                del waiting[block]
                if not waiting:
                    del self._to_claim[group]
        if tenant in self._waits:
            self._end_waits(tenant)

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """As `remove`, of different blocks of one tenant and namespace."""
        tenant, namespace = blocks[0].tenant, blocks[0].namespace
        waiting = (self._to_claim.get((tenant, namespace, partition)) for partition in range(self._partitioning.count))
        if self._put_off or not all(group is None or group.keys().isdisjoint(blocks) for group in waiting):
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
        """Have the callbacks be due whose blocks are all decided about."""
        waits, numbers = self._waits[tenant], self._numbers.get(tenant)
        oldest = next(iter(numbers.values())) if numbers else self.last_number + 1
        while waits and waits[0].newest < oldest:
            self._due.append(waits.popleft().callback)
        if not waits:
            del self._waits[tenant]

    def when_decided(self, tenant: str, callback: Callable[[], None], *, is_over: Callable[[], bool] = never) -> None:
        """Have `take_due` return the callback once every block of the tenant that is undecided now is so no more; if at all, where
        `is_over` returns True by then."""
        if tenant not in self._numbers:
            self._due.append(callback)
            return
        waits = self._waits.setdefault(tenant, deque())
        waits.append(_CommitWait(self.last_number, callback, is_over))
        if len(waits) % SPARE == 0:
            self._waits[tenant] = deque(wait for wait in waits if not wait.is_over())

    def take_due(self) -> list[Callable[[], None]]:
        """The callbacks whose time has come. They are not called where a block goes: that may be in the midst of making room."""
        due, self._due = self._due, []
        return due

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the master's decisions."""
        return bool(self._waits)

    # --- claims ---

    @property
    def has_to_claim(self) -> bool:
        """Whether `take` may give something."""
        return bool(self._to_claim)

    def partitions(self) -> set[int]:
        """Those of which there is something to claim."""
        return {partition for _tenant, _namespace, partition in self._to_claim}

    def take(self, max_blocks: int, partition: int = 0) -> list[Block]:
        """The blocks to claim in one message, all of one group of the partition; they are claimed then. Empty where there is nothing."""
        for group, waiting in self._to_claim.items():
            if group[2] != partition:
                continue
            claimed = self._claimed.get(group[0], ())
            taken = list(islice((block for block in waiting if block.key not in claimed) if claimed else waiting, max_blocks))
            if taken:
                if len(taken) == len(waiting):
                    del self._to_claim[group]
                else:
                    for block in taken:
                        del waiting[block]
                self.begin(taken)
                return taken
        return []

    def put_by(self, tenant: str, namespace: str | None, span: TraceSpan | None) -> None:
        """A request put what is to be claimed of that namespace, or waits for all claims of the tenant (None); nothing where it is not
        traced."""
        if span is not None:
            self._causes.append((tenant, namespace, span))

    def claimed_for(self, block: Block) -> list[TraceSpan]:
        """The traced requests that a claim of blocks of that one's tenant and namespace is for; each is given once."""
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
    def claims(self) -> int:
        """Keys of which a claim is under way."""
        return sum(map(len, self._claimed.values()))

    def is_claimed(self, tenant: str, key: bytes) -> bool:
        """Whether a claim of the key is under way."""
        return key in self._claimed.get(tenant, ())

    def begin(self, blocks: Sequence[Block]) -> None:
        """A claim of these keys of one tenant is under way: no other one begins."""
        if blocks:
            self._claimed.setdefault(blocks[0].tenant, set()).update([block.key for block in blocks])

    def end(self, blocks: Sequence[Block]) -> None:
        """That claim has been answered, or never will be."""
        claimed = self._claimed.get(blocks[0].tenant) if blocks else None
        if claimed is not None:
            claimed.difference_update([block.key for block in blocks])
            if not claimed:
                del self._claimed[blocks[0].tenant]

    def put_off(self, blocks: Iterable[Block]) -> None:
        """These claims came to nothing: they wait for `claim_again`. Blocks that are gone wait for nothing."""
        self._put_off.update((block, None) for block in blocks if not block.is_gone)

    def claim_again(self) -> None:
        """Whatever has been put off is to be claimed."""
        for block in self._put_off:
            self._to_claim.setdefault(self._group(block), {})[block] = None
        self._put_off.clear()

    def blocks(self) -> Iterator[Block]:
        """All of them; nothing must change meanwhile."""
        for of_tenant in self._numbers.values():
            yield from of_tenant
