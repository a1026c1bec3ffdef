"""Reads as nodes report them: the last read of each namespace, and the blocks that are read most. In memory only. Sans-I/O; `now_ns` is
passed in.

Each node counts for itself (store/block_table/access_counts.py) and reports its share of MAX_BLOCKS at most, once in ASK_S, with a
heartbeat: only while somebody wants to know, and forgotten then."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument

MAX_NAMESPACES: Final = 4096
"""Those that were read last."""
MAX_TOLD: Final = 256
"""Taken of one heartbeat."""


class NamespaceLastRead(NamedTuple):
    tenant: str
    namespace: str
    age_s: float


class LastReads:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._last_ns: OrderedDict[tuple[str, str], int] = OrderedDict()

    def take(self, reads: Iterable[NamespaceLastRead], now_ns: int) -> None:
        """What a node tells. Raises InvalidArgument for an age that is none; what came before it is taken."""
        for _number, read in zip(range(MAX_TOLD), reads, strict=False):
            if not 0 <= read.age_s < math.inf:
                raise InvalidArgument(f"a namespace was read {read.age_s} s ago, says a node: an age is a finite number above 0")
            name, last_ns = (read.tenant, read.namespace), now_ns - int(read.age_s * 1e9)
            if last_ns > self._last_ns.get(name, -(1 << 63)):
                self._last_ns[name] = last_ns
                self._last_ns.move_to_end(name)
        while len(self._last_ns) > MAX_NAMESPACES:
            self._last_ns.popitem(last=False)

    def age_s(self, tenant: str, namespace: str, now_ns: int) -> float | None:
        """Seconds since the last read; None: no node told of one."""
        last_ns = self._last_ns.get((tenant, namespace))
        return None if last_ns is None else max(0, now_ns - last_ns) / 1e9


NS_PER_S: Final = 1_000_000_000
WANTED_S: Final = 30.0
"""Nodes are asked for so long after somebody wanted to know."""
ASK_S: Final = 5.0
"""Between what one node tells."""
TOLD_S: Final = 20.0
"""What a node told counts for so long: it may be away, or its heartbeat may be late."""
MAX_BLOCKS: Final = 20_000
"""Told of by all nodes together."""
MIN_OF_NODE, MAX_OF_NODE = 16, 1024
"""Told of by one node."""
MAX_READS_PER_S: Final = 1e9
"""No node reads a block so often: the figure is wrong."""


@dataclass(slots=True)
class _NodeReads:
    """When it was asked last, and what it told last (None: nothing since it was known) and when."""

    asked_ns: int
    told_ns: int = 0
    blocks: "dict[str, dict[bytes, float]] | None" = None
    far: list[tuple[str, bytes, float]] = field(default_factory=list)


class BlockHeat:
    """By node id. Not thread-safe."""

    def __init__(self) -> None:
        self._until_ns = 0
        self._nodes: dict[int, _NodeReads] = {}

    def want(self, now_ns: int) -> None:
        """Somebody looks: nodes are asked from now on, for WANTED_S."""
        self._until_ns = now_ns + int(WANTED_S * NS_PER_S)

    def ask(self, node_id: int, live: int, now_ns: int) -> int:
        """Of how many blocks the node is to tell with its next heartbeat, where `live` nodes do; 0: of none now."""
        if now_ns >= self._until_ns:
            self._nodes.clear()
            return 0
        node = self._nodes.get(node_id)
        if node is not None and now_ns - node.asked_ns < ASK_S * NS_PER_S:
            return 0
        if node is None:
            # Somebody may look for good, and nodes come under ever new ids: those that are gone make way for the new one.
            self._nodes = {known_id: known for known_id, known in self._nodes.items() if now_ns - known.asked_ns <= TOLD_S * NS_PER_S}
            node = self._nodes[node_id] = _NodeReads(now_ns)
        node.asked_ns = now_ns
        return max(MIN_OF_NODE, min(MAX_OF_NODE, MAX_BLOCKS // max(1, live)))

    def take(self, node_id: int, reports: Sequence[pb.HotBlocks], now_ns: int) -> None:
        """What a node tells, in place of what it told before; of one that was not asked nothing is kept. Raises InvalidArgument for what it
        cannot have counted."""
        if any(
            len(report.keys) != len(report.reads_per_s) or len(report.remote_reads_per_s) not in (0, len(report.keys)) for report in reports
        ):
            raise InvalidArgument("a node tells of hot blocks and how often they are read, but not as many of both")
        blocks = {report.tenant: dict(zip(report.keys, report.reads_per_s, strict=True)) for report in reports}
        count = sum(map(len, blocks.values()))
        if count > MAX_OF_NODE:
            raise InvalidArgument(f"a node tells of {count} hot blocks: at most {MAX_OF_NODE}")
        if not all(0 <= rate <= MAX_READS_PER_S for report in reports for rate in (*report.reads_per_s, *report.remote_reads_per_s)):
            raise InvalidArgument(f"a node tells of a block that is read more than {MAX_READS_PER_S:g} times a second, or less than never")
        node = self._nodes.get(node_id)
        if node is not None and blocks:
            node.blocks, node.told_ns = blocks, now_ns
            node.far = [
                (report.tenant, key, remote_reads_per_s)
                for report in reports
                for key, remote_reads_per_s in zip(
                    report.keys, report.remote_reads_per_s, strict=False
                )  # none where the release tells none
                if remote_reads_per_s
            ]

    def of(self, tenant: str, now_ns: int) -> dict[bytes, float]:
        """The tenant's blocks that were told of, with their reads a second at all nodes."""
        found: dict[bytes, float] = {}
        for node in self._nodes.values():
            if node.blocks is None or now_ns - node.told_ns > TOLD_S * NS_PER_S:
                continue
            for key, reads_per_s in node.blocks.get(tenant, {}).items():
                found[key] = found.get(key, 0.0) + reads_per_s
        return found

    def far_reads(self, now_ns: int) -> Iterator[tuple[str, bytes, float]]:
        """Tenant, key, and reads a second by other hosts than the node's, of each block that each node told of: as it is now, whatever is
        told while it is gone through."""
        told = [node.far for node in self._nodes.values() if now_ns - node.told_ns <= TOLD_S * NS_PER_S]
        return itertools.chain.from_iterable(told)
