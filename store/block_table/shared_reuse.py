"""Exchange of what eviction policies learn of reuse with the policies of other nodes.

A node reports the statistics of its tenants, and receives the sums of all other nodes for these tenants
(master/directory/membership/cluster_reuse.py). So a prompt's class and age are worth the same on every node, and an
empty node need not learn from nothing.
"""

import heapq
from collections.abc import Iterable

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import MAX_REUSE_TENANTS
from kvstore.store.block_table.policy_families import PolicyFamilies
from kvstore.tiers.policies.interface import PolicyFamily
from kvstore.tiers.policies.prefix.visits import CLASSES
from kvstore.tiers.policies.reuse_statistics import ReuseStatistics


class SharedReuse:
    """Statistics of the tenants with most blocks, and what is known from other nodes. Not thread-safe."""

    def __init__(self, families: PolicyFamilies) -> None:
        self._families = families
        self._of_others: dict[str, ReuseStatistics] = {}
        """Of the tenants in the last report that other nodes know, too."""
        self._reported: list[str] = []
        """Tenants in the last report."""
        self._reported_accesses = 0
        self.exchanges = 0
        """Answers with statistics of other nodes."""
        self.refused = 0
        """Statistics in answers that were not usable."""
        families.on_new_family = self._begin

    def report(self, accesses: int, *, is_first: bool) -> list[tuple[str, bytes]]:
        """Return packed statistics of the MAX_REUSE_TENANTS tenants with most blocks. Empty if `accesses`, the count of
        the block table, is that of the last report, unless this is the first one to a master."""
        if accesses == self._reported_accesses and not is_first:
            return []
        self._reported_accesses = accesses
        found = []
        for tenant in heapq.nlargest(MAX_REUSE_TENANTS, self._families, key=lambda tenant: len(self._families.blocks_of(tenant))):
            family = self._families.family(tenant)
            statistics = family.reuse_statistics() if family is not None else None
            if statistics is not None:
                found.append((tenant, statistics.pack()))
        self._reported = [tenant for tenant, _ in found]
        return found

    def apply(self, answer: Iterable[tuple[str, bytes]]) -> None:
        """Use the answer to the last report. A tenant that it lacks is known to no other node."""
        former, self._of_others = self._of_others, {}
        for tenant, packed in answer:
            try:
                self._of_others[tenant] = ReuseStatistics.unpack(packed, CLASSES)
            except InvalidArgument:
                self.refused += 1
        self.exchanges += bool(self._of_others)
        for tenant in self._reported:
            family = self._families.family(tenant)
            if family is not None and (tenant in self._of_others or tenant in former):
                family.use_statistics_of_others(self._of_others.get(tenant) or ReuseStatistics.none(CLASSES))

    @property
    def observations_of_others(self) -> int:
        """Visits observed by other nodes that the policies use."""
        return round(sum(statistics.observations for statistics in self._of_others.values()))

    def _begin(self, tenant: str, family: PolicyFamily[bytes]) -> None:
        """Let new policies begin with what other nodes know."""
        if (statistics := self._of_others.get(tenant)) is not None:
            family.use_statistics_of_others(statistics)
