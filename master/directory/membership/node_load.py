"""Load of a node and the transfer rates that it measured. Sans-I/O; `now_ns` is passed in.

Placement weighs the free space of a node by its load: one that is as busy as the mean of all gets half of what an idle one of the same free
space gets. Up to IDLE_BYTES_S a node counts as idle: what little traffic there is then says nothing of where more of it should go."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import MAX_RATES

if TYPE_CHECKING:
    from kvstore.master.directory.membership.members import NodeMember

SPAN_S: Final = 10.0
"""What a node did counts for 1/e after this: writers follow a change within seconds, and not the noise of one heartbeat."""
IDLE_BYTES_S: Final = 16 << 20
"""A thousandth of what a node's memory gives, a hundredth of a 10 Gbit/s NIC."""
COUNTERS: Final = ("in_bytes", "out_bytes")
"""Of a node's heartbeat: values put here, and values read, however they went."""


class NodeLoad:
    """Of one process of a node. Not thread-safe."""

    def __init__(self) -> None:
        self.bytes_s = 0.0
        self._total_bytes: int | None = None
        self._told_ns = 0

    def told(self, counters: Mapping[str, int], now_ns: int) -> None:
        """What the node has counted since its process began."""
        total_bytes = sum(counters.get(name, 0) for name in COUNTERS)
        elapsed_s = (now_ns - self._told_ns) / 1e9
        if self._total_bytes is not None and elapsed_s > 0:
            kept = math.exp(-elapsed_s / SPAN_S)
            self.bytes_s = kept * self.bytes_s + (1 - kept) * max(0, total_bytes - self._total_bytes) / elapsed_s
        self._total_bytes, self._told_ns = total_bytes, now_ns


def shares(nodes: Iterable["NodeMember"]) -> dict[int, float]:
    """By node id, what is left of its share: 1 of an idle one, less the busier it is beside the mean of these."""
    busy = {node.node_id: max(0.0, node.load.bytes_s - IDLE_BYTES_S) for node in nodes}
    mean = sum(busy.values()) / len(busy) if busy else 0.0
    return {node_id: 1 / (1 + bytes_s / mean) if bytes_s else 1.0 for node_id, bytes_s in busy.items()}


MAX_BYTES_PER_S: Final = 1e15
"""No network carries a petabyte a second: the figure is wrong."""


@dataclass(frozen=True, slots=True)
class NodeRate:
    """At what rate bytes come from another node, measured by who received them."""

    bytes_per_s: float
    basis_bytes: int
    measured_ns: int
    """By the master's clock: when it heard of it, less the age that it was told."""


class NodeRates:
    """A node's last report, less what has grown old. At most MAX_RATES, so that 1,000 nodes take 32,000 and not a million."""

    __slots__ = ("_bytes_per_s", "_next_expiry_ns", "_rates", "_ttl_ns")

    def __init__(self, reports: Sequence[pb.PeerRate] = (), *, ttl_ns: int = 0, now_ns: int = 0) -> None:
        """Raises InvalidArgument: too many, or what cannot have been measured."""
        if len(reports) > MAX_RATES:
            raise InvalidArgument(f"a node reports {len(reports)} rates: at most {MAX_RATES}")
        for report in reports:
            if not 0 < report.bytes_per_s <= MAX_BYTES_PER_S:
                raise InvalidArgument(f"a node reports {report.bytes_per_s:g} bytes/s: it must be above 0 and at most {MAX_BYTES_PER_S:g}")
            if not 0 <= report.age_s < inf:
                raise InvalidArgument(f"a node reports a rate of {report.age_s:g} s ago")
        self._ttl_ns = ttl_ns
        self._rates = {
            report.node_id: NodeRate(report.bytes_per_s, report.basis_bytes, now_ns - int(report.age_s * 1e9)) for report in reports
        }
        self._bytes_per_s: dict[int, float] = {}
        self._next_expiry_ns = now_ns

    def fresh(self, now_ns: int) -> Mapping[int, NodeRate]:
        """Those that count, by the id of the node that sent."""
        self.bytes_per_s(now_ns)
        return self._rates

    def bytes_per_s(self, now_ns: int) -> Mapping[int, float]:
        """The rates alone. O(1) but where one has grown old since the last call: the scheduler asks for them with each decision."""
        if now_ns >= self._next_expiry_ns:
            self._rates = {node_id: rate for node_id, rate in self._rates.items() if rate.measured_ns + self._ttl_ns > now_ns}
            self._bytes_per_s = {node_id: rate.bytes_per_s for node_id, rate in self._rates.items()}
            self._next_expiry_ns = _first(rate.measured_ns for rate in self._rates.values()) + self._ttl_ns
        return self._bytes_per_s


def _first(times_ns: Iterable[int]) -> int:
    return min(times_ns, default=1 << 63)
