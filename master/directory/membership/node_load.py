"""Load of a node and the transfer rates that it measured. Sans-I/O; `now_ns` is passed in.

Placement weighs a node's free space by its load: a node with the mean load gets half the share of an idle one with
the same free space. Up to IDLE_BYTES_S a node counts as idle: so little traffic is no reason to prefer other nodes."""

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
"""Time constant of the average (1/e): writers follow a change within seconds, but not the noise of one heartbeat."""
IDLE_BYTES_S: Final = 16 << 20
"""A thousandth of a node's memory bandwidth, a hundredth of a 10 Gbit/s NIC."""
COUNTERS: Final = ("in_bytes", "out_bytes")
"""Counters of a heartbeat: bytes written to and read from the node, over any transport."""


class NodeLoad:
    """Moving average of one node process's traffic. Not thread-safe."""

    def __init__(self) -> None:
        self.bytes_s = 0.0
        self._total_bytes: int | None = None
        self._updated_ns = 0

    def update(self, counters: Mapping[str, int], now_ns: int) -> None:
        """Update from the node's counters since its process began."""
        total_bytes = sum(counters.get(name, 0) for name in COUNTERS)
        elapsed_s = (now_ns - self._updated_ns) / 1e9
        if self._total_bytes is not None and elapsed_s > 0:
            kept = math.exp(-elapsed_s / SPAN_S)
            self.bytes_s = kept * self.bytes_s + (1 - kept) * max(0, total_bytes - self._total_bytes) / elapsed_s
        self._total_bytes, self._updated_ns = total_bytes, now_ns


def shares(nodes: Iterable["NodeMember"]) -> dict[int, float]:
    """Return, by node id, the factor of its share: 1 for an idle node, less the busier it is relative to the mean."""
    busy = {node.node_id: max(0.0, node.load.bytes_s - IDLE_BYTES_S) for node in nodes}
    mean = sum(busy.values()) / len(busy) if busy else 0.0
    return {node_id: 1 / (1 + bytes_s / mean) if bytes_s else 1.0 for node_id, bytes_s in busy.items()}


MAX_BYTES_PER_S: Final = 1e15
"""Limit of plausible rates: no network carries a petabyte a second."""


@dataclass(frozen=True, slots=True)
class NodeRate:
    """Rate of receiving from another node, measured by the receiver."""

    bytes_per_s: float
    basis_bytes: int
    measured_ns: int
    """Receive time by the master's clock, less the reported age."""


class NodeRates:
    """A node's last report of rates, without expired ones. At most MAX_RATES, so that 1,000 nodes take 32,000 and
    not a million."""

    __slots__ = ("_bytes_per_s", "_next_expiry_ns", "_rates", "_ttl_ns")

    def __init__(self, reports: Sequence[pb.PeerRate] = (), *, ttl_ns: int = 0, now_ns: int = 0) -> None:
        """Raises InvalidArgument for too many rates, or implausible ones."""
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
        """Return the unexpired rates, by the id of the sending node."""
        self.bytes_per_s(now_ns)
        return self._rates

    def bytes_per_s(self, now_ns: int) -> Mapping[int, float]:
        """Return the rates alone. O(1) unless one has expired since the last call: the scheduler calls it for each
        decision."""
        if now_ns >= self._next_expiry_ns:
            self._rates = {node_id: rate for node_id, rate in self._rates.items() if rate.measured_ns + self._ttl_ns > now_ns}
            self._bytes_per_s = {node_id: rate.bytes_per_s for node_id, rate in self._rates.items()}
            self._next_expiry_ns = _first(rate.measured_ns for rate in self._rates.values()) + self._ttl_ns
        return self._bytes_per_s


def _first(times_ns: Iterable[int]) -> int:
    return min(times_ns, default=1 << 63)
