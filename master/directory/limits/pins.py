"""Pins: blocks that clients keep from eviction. They are durable, and survive a block's unavailability. Sans-I/O.

A pin has no end, or a time at which `expire` ends it. Pinned keys are in Tenant.pins. A node is notified when a
block is pinned or unpinned (here) and when it publishes a pinned block (block_events.py, replication.py). Blocks
that it held before, and whose pins it is not notified of by the end of its inventory, it unpins."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.master.catalogs.interface import Change
from kvstore.master.directory import records
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.queries import DirectoryQueries
from kvstore.master.directory.index.tenants import FOR_GOOD, Tenant
from kvstore.master.directory.limits.quotas import TenantShare
from kvstore.master.directory.placement.commands import NodeCommands
from kvstore.master.directory.records import PinRecord
from kvstore.security.quotas.quota import PINS

NS_PER_MS: Final = 1_000_000
MAX_ENDED: Final = 4096
"""Pins that one `expire` ends: some milliseconds."""
SPARE_ENDS: Final = 1024


@dataclass(frozen=True, slots=True)
class PinResult:
    """Result of pinning or unpinning. `flags` by key (1: the block exists; see `held`); `ops` for the catalog;
    `commands` for the nodes."""

    flags: bytes
    ops: list[Change]
    commands: NodeCommands


class Pins:
    """Pins of all tenants, with their ends. Not thread-safe."""

    def __init__(
        self,
        parts: DirectoryParts,
        queries: DirectoryQueries,
        *,
        share_of: Callable[[str, int], TenantShare | None],
        wall_ns: int,
        now_ns: int,
    ) -> None:
        """`share_of` returns a tenant's share of a limit. `now_ns` and `wall_ns` are the same time by the loop's
        clock and by the wall's."""
        self._rows, self._tenants, self._queries, self._record_policy = parts.rows, parts.tenants, queries, parts.record_policy
        self._master_epoch = parts.master_epoch
        self._share_of = share_of
        self._wall_offset_ns = wall_ns - now_ns
        """Wall clock minus the loop's clock."""
        self._ends: list[tuple[int, str, bytes]] = []
        """Heap of (end, tenant, key): each pin with an end, and stale entries of removed or renewed ones."""
        self._max_ends = SPARE_ENDS

    def load(self, owner: Tenant, record: PinRecord) -> None:
        """Load a pin of the catalog. If it has ended meanwhile, the next `expire` removes it."""
        self._set(owner, record.key, record.until_ms * NS_PER_MS - self._wall_offset_ns if record.until_ms else FOR_GOOD)

    def pin(self, tenant: str, keys: Sequence[bytes], *, pinned: bool) -> PinResult:
        """Pin the existing blocks, or unpin them. Durable with the operations. Raises QuotaExceeded, with nothing
        pinned."""
        pin_result = self._begin(tenant, keys)
        if pinned:
            self._check_share(tenant, keys, pin_result)
        owner = self._owner(tenant, pin_result)
        for key, flag in zip(keys, pin_result.flags, strict=True):
            if pinned and flag:
                self._set(owner, key, FOR_GOOD)
                pin_result.ops.extend((records.pin(owner.prefix, key), *self._record_policy.settle(owner, key)))
                self._command(pin_result, owner, key, pinned=True)
            elif not pinned and key in owner.pins:
                self._unpin(pin_result, owner, key)
        return pin_result

    def pin_for(self, tenant: str, keys: Sequence[bytes], *, ttl_ns: int, now_ns: int) -> PinResult:
        """As `pin`, for `ttl_ns`. Pins that last longer stay. Raises QuotaExceeded, with nothing pinned."""
        pin_result = self._begin(tenant, keys)
        self._check_share(tenant, keys, pin_result)
        owner, until_ns = self._owner(tenant, pin_result), now_ns + ttl_ns
        until_ms = -(-(until_ns + self._wall_offset_ns) // NS_PER_MS)
        for key, flag in zip(keys, pin_result.flags, strict=True):
            if flag and owner.pins.get(key, 0) < until_ns:
                self._set(owner, key, until_ns)
                pin_result.ops.extend((records.pin(owner.prefix, key, until_ms=until_ms), *self._record_policy.settle(owner, key)))
                self._command(pin_result, owner, key, pinned=True)
        return pin_result

    def held(
        self, tenant: str, keys: Sequence[bytes], pin_result: PinResult, answers: Iterable[tuple[Sequence[bytes], bytes | None]]
    ) -> bytes:
        """Return the final flags of a pin of `keys`, once it is durable and the nodes have responded. `answers` has,
        for each node, its keys and flags (1: it has the block); None for a node that will learn of the pin when it
        registers. Blocks that were evicted meanwhile are not there, and their pins end."""
        pins = self._tenants.lookup(tenant).pins
        gone, there = set[bytes](), set[bytes]()
        for sent_keys, flags in answers:
            for key, flag in zip(sent_keys, flags or b"\1" * len(sent_keys), strict=True):
                (there if flag else gone).add(key)
        gone -= there
        return bytes(flag and key in pins and key not in gone for key, flag in zip(keys, pin_result.flags, strict=True))

    def unpinned(self, tenant: str, keys: Sequence[bytes]) -> int:
        """Return how many different keys have no pin."""
        return len(set(keys).difference(self._tenants.lookup(tenant).pins))

    def expire(self, now_ns: int) -> PinResult:
        """End pins whose time is over, at most MAX_ENDED; further ones at the next call."""
        pin_result = PinResult(b"", [], NodeCommands(self._master_epoch))
        while self._ends and self._ends[0][0] <= now_ns and len(pin_result.ops) < MAX_ENDED:
            until_ns, tenant, key = heapq.heappop(self._ends)
            owner = self._tenants.lookup(tenant)
            if owner.pins.get(key) == until_ns:
                self._unpin(pin_result, owner, key)
        return pin_result

    def check_integrity(self) -> None:
        """Assert that each pin with an end is in the heap. For tests."""
        assert {end for tenant in self._tenants for end in _ends_of(tenant)} <= set(self._ends)

    def _begin(self, tenant: str, keys: Sequence[bytes]) -> PinResult:
        return PinResult(self._queries.exists(tenant, keys), [], NodeCommands(self._master_epoch))

    def _check_share(self, tenant: str, keys: Sequence[bytes], pin_result: PinResult) -> None:
        share = self._share_of(tenant, PINS)
        if share is None:
            return
        pins = self._tenants.lookup(tenant).pins
        more = {key for key, flag in zip(keys, pin_result.flags, strict=True) if flag and key not in pins}
        if more and len(pins) + len(more) > share.now:
            raise share.exceeded(tenant, PINS, used=len(pins), more=len(more))

    def _owner(self, tenant: str, pin_result: PinResult) -> Tenant:
        return self._tenants.of(tenant) if 1 in pin_result.flags else self._tenants.lookup(tenant)

    def _set(self, owner: Tenant, key: bytes, until_ns: int) -> None:
        owner.pins[key] = until_ns
        if until_ns == FOR_GOOD:
            return
        heapq.heappush(self._ends, (until_ns, owner.name, key))
        if len(self._ends) > self._max_ends:  # a client renews its pins repeatedly
            self._ends = [end for tenant in self._tenants for end in _ends_of(tenant)]
            heapq.heapify(self._ends)
            self._max_ends = 2 * len(self._ends) + SPARE_ENDS

    def _unpin(self, pin_result: PinResult, owner: Tenant, key: bytes) -> None:
        del owner.pins[key]
        pin_result.ops.extend((records.unpin(owner.prefix, key), *self._record_policy.settle(owner, key)))
        self._command(pin_result, owner, key, pinned=False)

    def _command(self, pin_result: PinResult, owner: Tenant, key: bytes, *, pinned: bool) -> None:
        for node_id in self._rows.readable_at(owner, key):
            pin_result.commands.set_pinned(node_id, owner, key, pinned=pinned)


def _ends_of(tenant: Tenant) -> list[tuple[int, str, bytes]]:
    return [(until_ns, tenant.name, key) for key, until_ns in tenant.pins.items() if until_ns != FOR_GOOD]
