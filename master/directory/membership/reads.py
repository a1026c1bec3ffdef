"""Reads that nodes report: the last read of each namespace, and the most read blocks. In memory only. Sans-I/O;
`now_ns` is passed in.

Each node counts its own reads (store/block_table/access_counts.py). With a heartbeat, at most once in REPORT_INTERVAL_S, it
reports its share of MAX_BLOCKS. Reports are requested only while a consumer wants them, and dropped afterwards."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument

MAX_NAMESPACES: Final = 4096
"""Most recently read namespaces that are kept."""
MAX_REPORTED: Final = 256
"""Namespaces used of one heartbeat."""


class NamespaceLastRead(NamedTuple):
    """Time since a namespace was last read."""

    tenant: str
    namespace: str
    age_s: float


class LastReads:
    """Time of the last read of each namespace. Not thread-safe."""

    def __init__(self) -> None:
        self._last_ns: OrderedDict[tuple[str, str], int] = OrderedDict()

    def take(self, reads: Iterable[NamespaceLastRead], now_ns: int) -> None:
        """Apply a node's report. Raises InvalidArgument for an invalid age; entries before it are applied."""
        for _number, read in zip(range(MAX_REPORTED), reads, strict=False):
            if not 0 <= read.age_s < math.inf:
                raise InvalidArgument(f"a node reported that a namespace was read {read.age_s} s ago: an age is finite and not negative")
            name, last_ns = (read.tenant, read.namespace), now_ns - int(read.age_s * 1e9)
            if last_ns > self._last_ns.get(name, -(1 << 63)):
                self._last_ns[name] = last_ns
                self._last_ns.move_to_end(name)
        while len(self._last_ns) > MAX_NAMESPACES:
            self._last_ns.popitem(last=False)

    def age_s(self, tenant: str, namespace: str, now_ns: int) -> float | None:
        """Return the seconds since the last read, None if no node reported one."""
        last_ns = self._last_ns.get((tenant, namespace))
        return None if last_ns is None else max(0, now_ns - last_ns) / 1e9


NS_PER_S: Final = 1_000_000_000
WANTED_S: Final = 30.0
"""Reports are requested for this long after the last `request_reports`."""
REPORT_INTERVAL_S: Final = 5.0
"""Minimum interval of one node's reports."""
REPORT_TTL_S: Final = 20.0
"""A report is used for this long: its node may be unreachable, or its heartbeat late."""
MAX_BLOCKS: Final = 20_000
"""Reported blocks of all nodes together."""
MIN_OF_NODE, MAX_OF_NODE = 16, 1024
"""Limits of the reported blocks of one node."""
MAX_READS_PER_S: Final = 1e9
"""Limit of plausible rates."""


@dataclass(slots=True)
class _NodeReads:
    """Time of a node's last request, and its last report (None: none yet) with its time."""

    requested_ns: int
    reported_ns: int = 0
    blocks: "dict[str, dict[bytes, float]] | None" = None
    remote: list[tuple[str, bytes, float]] = field(default_factory=list)


class BlockHeat:
    """Most read blocks by node, as reported. Not thread-safe."""

    def __init__(self) -> None:
        self._until_ns = 0
        self._nodes: dict[int, _NodeReads] = {}

    def request_reports(self, now_ns: int) -> None:
        """Request reports from now on, for WANTED_S."""
        self._until_ns = now_ns + int(WANTED_S * NS_PER_S)

    def blocks_to_report(self, node_id: int, live: int, now_ns: int) -> int:
        """Return how many blocks the node is to report with its next heartbeat, of `live` nodes; 0 for none now."""
        if now_ns >= self._until_ns:
            self._nodes.clear()
            return 0
        node = self._nodes.get(node_id)
        if node is not None and now_ns - node.requested_ns < REPORT_INTERVAL_S * NS_PER_S:
            return 0
        if node is None:
            # Reports may be wanted for ever, while nodes return with new ids: drop those without recent reports.
            self._nodes = {
                known_id: known for known_id, known in self._nodes.items() if now_ns - known.requested_ns <= REPORT_TTL_S * NS_PER_S
            }
            node = self._nodes[node_id] = _NodeReads(now_ns)
        node.requested_ns = now_ns
        return max(MIN_OF_NODE, min(MAX_OF_NODE, MAX_BLOCKS // max(1, live)))

    def take(self, node_id: int, reports: Sequence[pb.HotBlocks], now_ns: int) -> None:
        """Replace a node's report; one that was not requested is dropped. Raises InvalidArgument for implausible
        values."""
        if any(
            len(report.keys) != len(report.reads_per_s) or len(report.remote_reads_per_s) not in (0, len(report.keys)) for report in reports
        ):
            raise InvalidArgument("a node reported hot blocks and their reads in lists of different length")
        blocks = {report.tenant: dict(zip(report.keys, report.reads_per_s, strict=True)) for report in reports}
        count = sum(map(len, blocks.values()))
        if count > MAX_OF_NODE:
            raise InvalidArgument(f"a node reported {count} hot blocks: at most {MAX_OF_NODE} are allowed")
        if not all(0 <= rate <= MAX_READS_PER_S for report in reports for rate in (*report.reads_per_s, *report.remote_reads_per_s)):
            raise InvalidArgument(f"a node reported the reads of a block as negative, or above {MAX_READS_PER_S:g} a second")
        node = self._nodes.get(node_id)
        if node is not None and blocks:
            node.blocks, node.reported_ns = blocks, now_ns
            node.remote = [
                (report.tenant, key, remote_reads_per_s)
                for report in reports
                for key, remote_reads_per_s in zip(report.keys, report.remote_reads_per_s, strict=False)  # empty from older releases
                if remote_reads_per_s
            ]

    def of(self, tenant: str, now_ns: int) -> dict[bytes, float]:
        """Return the tenant's reported blocks, with their reads a second at all nodes."""
        found: dict[bytes, float] = {}
        for node in self._nodes.values():
            if node.blocks is None or now_ns - node.reported_ns > REPORT_TTL_S * NS_PER_S:
                continue
            for key, reads_per_s in node.blocks.get(tenant, {}).items():
                found[key] = found.get(key, 0.0) + reads_per_s
        return found

    def remote_reads(self, now_ns: int) -> Iterator[tuple[str, bytes, float]]:
        """Iterate over (tenant, key, reads a second by other hosts than the node's) of each node's report. A
        snapshot: later reports do not change it."""
        reports = [node.remote for node in self._nodes.values() if now_ns - node.reported_ns <= REPORT_TTL_S * NS_PER_S]
        return itertools.chain.from_iterable(reports)
