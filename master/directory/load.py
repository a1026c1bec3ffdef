"""How busy nodes are: bytes that each took and gave a second lately, by its heartbeats, and what that takes off its share. Pure.

Placement weighs a node's free room by it: one that is as busy as the mean of all gets half of what an idle one of the same room gets. Up
to IDLE_BYTES_S a node counts as idle: what little traffic there is then says nothing of where more of it should go.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

SPAN_S: Final = 10.0
"""What a node did counts for 1/e after this: writers follow a change within seconds, and not the noise of one heartbeat."""
IDLE_BYTES_S: Final = 16 << 20
"""A thousandth of what a node's memory gives, a hundredth of a 10 Gbit/s NIC."""
COUNTERS: Final = ("in_bytes", "out_bytes")
"""Of a node's heartbeat: values put here, and values read, however they went."""


class Load:
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


class Loaded(Protocol):
    """A node; membership.Member is one."""

    @property
    def node_id(self) -> int: ...
    @property
    def load(self) -> Load: ...


def shares(nodes: Iterable[Loaded]) -> dict[int, float]:
    """By node id, what is left of its share: 1 of an idle one, less the busier it is beside the mean of these."""
    busy = {node.node_id: max(0.0, node.load.bytes_s - IDLE_BYTES_S) for node in nodes}
    mean = sum(busy.values()) / len(busy) if busy else 0.0
    return {node_id: 1 / (1 + bytes_s / mean) if bytes_s else 1.0 for node_id, bytes_s in busy.items()}
