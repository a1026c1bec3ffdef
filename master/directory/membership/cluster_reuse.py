"""What the eviction policies of all nodes have learned of reuse: each node's newest report, and their sums.

In memory only: nodes report to a new owner within seconds. Sans-I/O.
"""

from collections.abc import Collection
from typing import Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import MAX_REUSE_TENANTS
from kvstore.tiers.policies.prefix.visits import CLASSES
from kvstore.tiers.policies.reuse_statistics import ReuseStatistics

MAX_TENANT_CHARS: Final = 255


class ClusterReuse:
    """Statistics of live nodes by tenant, MAX_REUSE_TENANTS a node at most: 12 KB each, and as much for each sum. Not
    thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[int, dict[str, ReuseStatistics]] = {}
        self._sums: dict[str, tuple[ReuseStatistics, int]] = {}
        """Sum and number of summands."""
        self.refused = 0
        """Statistics that were ignored: malformed, or more than MAX_REUSE_TENANTS in a report."""

    def take(self, node_id: int, report: pb.ReuseReport) -> pb.ReuseReport:
        """Replace a node's report. Return the sums of the other nodes for its tenants, without those that no other node
        reported. One node weighs as much as MAX_OBSERVATIONS at most, whatever it reports."""
        self._drop(node_id)
        mine = self._nodes[node_id] = self._parse(report)
        answer = pb.ReuseReport()
        for tenant, statistics in mine.items():
            others, count = self._sums.get(tenant, (None, 0))
            if others is not None:
                answer.tenants.add(tenant=tenant, statistics=others.limited().pack())
            self._sums[tenant] = (others + statistics if others is not None else statistics), count + 1
        return answer

    def keep(self, node_ids: Collection[int]) -> None:
        """Drop the reports of all other nodes."""
        for node_id in self._nodes.keys() - set(node_ids):
            self._drop(node_id)

    def _parse(self, report: pb.ReuseReport) -> dict[str, ReuseStatistics]:
        found: dict[str, ReuseStatistics] = {}
        for one in report.tenants:
            try:
                if len(found) == MAX_REUSE_TENANTS or len(one.tenant) > MAX_TENANT_CHARS:
                    raise InvalidArgument("too many tenants, or no such tenant")
                found[one.tenant] = ReuseStatistics.unpack(one.statistics, CLASSES).limited()
            except InvalidArgument:
                self.refused += 1
        return found

    def _drop(self, node_id: int) -> None:
        for tenant, statistics in self._nodes.pop(node_id, {}).items():
            total, count = self._sums.pop(tenant)
            if count > 1:
                self._sums[tenant] = total.without(statistics), count - 1

    def __len__(self) -> int:
        """Number of tenants of all nodes together."""
        return len(self._sums)
