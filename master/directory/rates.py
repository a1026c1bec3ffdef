"""What one node has measured of the ways that others' blocks take to it, and how long that counts. Sans-I/O; `now_ns` is passed in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import MAX_RATES

MAX_BYTES_PER_S: Final = 1e15
"""No network carries a petabyte a second: the figure is wrong."""


class RateReport(Protocol):
    """What a node says of its way from another; kvstore.v1.PeerRate is one."""

    @property
    def node_id(self) -> int: ...
    @property
    def bytes_per_s(self) -> float: ...
    @property
    def basis_bytes(self) -> int: ...
    @property
    def age_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Rate:
    """At what rate bytes come from another node, measured by who received them."""

    bytes_per_s: float
    basis_bytes: int
    measured_ns: int
    """By the master's clock: when it heard of it, less the age that it was told."""


class Rates:
    """A node's last report, less what has grown old. At most MAX_RATES, so that 1,000 nodes take 32,000 and not a million."""

    __slots__ = ("_bytes_per_s", "_next_expiry_ns", "_rates", "_ttl_ns")

    def __init__(self, reports: Sequence[RateReport] = (), *, ttl_ns: int = 0, now_ns: int = 0) -> None:
        """Raises InvalidArgument: too many, or what cannot have been measured."""
        if len(reports) > MAX_RATES:
            raise InvalidArgument(f"a node reports {len(reports)} rates: at most {MAX_RATES}")
        for report in reports:
            if not 0 < report.bytes_per_s <= MAX_BYTES_PER_S:
                raise InvalidArgument(f"a node reports {report.bytes_per_s:g} bytes/s: it must be above 0 and at most {MAX_BYTES_PER_S:g}")
            if not 0 <= report.age_s < inf:
                raise InvalidArgument(f"a node reports a rate of {report.age_s:g} s ago")
        self._ttl_ns = ttl_ns
        self._rates = {report.node_id: Rate(report.bytes_per_s, report.basis_bytes, now_ns - int(report.age_s * 1e9)) for report in reports}
        self._bytes_per_s: dict[int, float] = {}
        self._next_expiry_ns = now_ns

    def fresh(self, now_ns: int) -> Mapping[int, Rate]:
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
