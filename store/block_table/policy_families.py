"""Eviction policies of a node by tenant, their remembered blocks, and reads not yet passed to them."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstore.store.block_table.block import Block, BlockColumns
from kvstore.store.block_table.policy_states import BlockStates
from kvstore.tiers.policies.interface import EvictionPolicy, PolicyFamily

MAX_PENDING_TOUCHES: Final = 64
"""Reads not yet passed to the policies. One at a time takes three times as long, and a reader waits."""
MAX_FORGOTTEN: Final = 64
"""Remembered blocks that are forgotten at once; bounds the time of an eviction."""
MAX_HOLDERS_SEARCHED: Final = 256
"""Policies examined at a time for one that remembers much."""


class Holder(Protocol):
    """Holder of a policy; `policy` may be replaced by a wrapper of it."""

    policy: EvictionPolicy[bytes]


class Touched(Protocol):
    """Receiver of reads for its policies."""

    def pass_touch(self, group: int, key: bytes) -> None: ...


@dataclass(slots=True, eq=False)
class _Tenant:
    family: PolicyFamily[bytes]
    policies: int = 0


@dataclass(slots=True, eq=False)
class _Ledger:
    limit: int | None
    count: int = 0
    holders: OrderedDict[int, Holder] = field(default_factory=OrderedDict)
    """By identity, in the order in which they are examined."""


class PolicyFamilies:
    """Policy families by tenant, shared by the eviction orders of all tiers. Not thread-safe: called from the node's
    loop.

    A family exists while the tenant has blocks, so that former tenants cost searches nothing.
    """

    def __init__(
        self,
        make_family: Callable[[], PolicyFamily[bytes]],
        blocks_of: Callable[[str], Mapping[bytes, Block]],
        *,
        max_remembered: int | None = None,
    ) -> None:
        """`blocks_of` returns a tenant's visible blocks by key. All policies together remember at most `max_remembered`
        evicted blocks; None: no bound."""
        self._make_family = make_family
        self.blocks_of = blocks_of
        self._tenants: dict[str, _Tenant] = {}
        self.on_new_family: Callable[[str, PolicyFamily[bytes]], None] = lambda tenant, family: None
        """Called with each new tenant and its family."""
        self._ledger = _Ledger(max_remembered)
        self._pending_touches: list[tuple[Touched, int, bytes]] = []

    # --- policies ---

    def open(self, tenant: str, tier: int, columns: BlockColumns) -> EvictionPolicy[bytes]:
        """Return a new policy of the tenant, whose blocks are in `columns`. `hold` must follow."""
        mine = self._tenants.get(tenant)
        if mine is None:
            mine = self._tenants[tenant] = _Tenant(self._make_family())
            mine.family.use_states(BlockStates(self.blocks_of(tenant), columns))
            self.on_new_family(tenant, mine.family)
        mine.policies += 1
        return mine.family.policy(tier)

    def family(self, tenant: str) -> PolicyFamily[bytes] | None:
        """Return the tenant's family; None if it has no blocks."""
        mine = self._tenants.get(tenant)
        return mine.family if mine is not None else None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tenants that have blocks."""
        return iter(self._tenants)

    def hold(self, holder: Holder) -> None:
        """Count the blocks that the holder's policy remembers."""
        self._ledger.holders[id(holder)] = holder

    def close(self, tenant: str, holder: Holder) -> None:
        """Close an empty policy, between `suspend` and `resume` of its count."""
        del self._ledger.holders[id(holder)]
        mine = self._tenants[tenant]
        mine.policies -= 1
        if not mine.policies:
            del self._tenants[tenant]
        self._ledger.count += holder.policy.remembered - holder.policy.close()

    # --- remembered blocks ---

    @property
    def remembered(self) -> int:
        """Evicted blocks that all policies remember."""
        return self._ledger.count

    def suspend(self, policy: EvictionPolicy[bytes]) -> None:
        """Exclude the blocks that a policy remembers, before it is called."""
        self._ledger.count -= policy.remembered

    def resume(self, policy: EvictionPolicy[bytes]) -> None:
        """Include it again."""
        self._ledger.count += policy.remembered

    def trim(self, policy: EvictionPolicy[bytes], times: int) -> None:
        """Have policies forget blocks beyond the limit, up to MAX_FORGOTTEN per time: this one if it remembers more
        than its share, else another that does."""
        ledger = self._ledger
        for _ in range(times):
            if ledger.limit is None or ledger.count <= ledger.limit:
                return
            share = ledger.limit // len(ledger.holders)
            for _ in range(min(len(ledger.holders), MAX_HOLDERS_SEARCHED)):
                if policy.remembered > share:
                    break
                number, holder = next(iter(ledger.holders.items()))
                ledger.holders.move_to_end(number)
                policy = holder.policy
            self.suspend(policy)
            policy.forget(MAX_FORGOTTEN)
            self.resume(policy)

    # --- reads ---

    def touch(self, order: Touched, group: int, key: bytes) -> None:
        """Record a read."""
        self._pending_touches.append((order, group, key))
        if len(self._pending_touches) >= MAX_PENDING_TOUCHES:
            self.flush_touches()

    def flush_touches(self) -> None:
        """Pass pending reads to the policies, in the order of the reads over all tiers. Called before other operations,
        and periodically, because policies have clocks."""
        if self._pending_touches:
            touches, self._pending_touches = self._pending_touches, []
            for order, group, key in touches:
                order.pass_touch(group, key)
