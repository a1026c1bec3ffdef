"""What a client has done since it was made."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.protocol.message import TIER_BITS


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counters since the client was made."""

    requests: int = 0
    """Operations called, a batch being one."""
    hits: int = 0
    """Blocks found by get, get_into, view and their batches."""
    misses: int = 0
    puts: int = 0
    """Blocks stored by this client."""
    already_present: int = 0
    """Puts that found their block stored."""
    bytes_in: int = 0
    """Bytes of values read."""
    bytes_out: int = 0
    """Bytes of values stored."""
    engine_bytes: int = 0
    """Of both, what the transfer engine moved: to or from other hosts."""
    stale_hints: int = 0
    """Reads that went to a node which no longer had the block."""
    retries: int = 0
    """Requests sent again: busy keys, unreachable nodes, stale hints, lapsed leases."""
    checksum_failures: int = 0
    """Values that arrived with another checksum than recorded; the caller never saw them."""
    held_blocks: int = 0
    """Blocks that lookups found and hold, each time that they did."""
    unheld_blocks: int = 0
    """Blocks that lookups found and were to hold, and that no hold was to be had for."""
    hits_by_tier: Mapping[str, int] = field(default_factory=dict)


class Counters:
    """The live form of ClientStats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}
        self._by_tier = dict.fromkeys(TIER_BITS.values(), 0)

    def add(self, **counts: int) -> None:
        """Raise counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._values[name] = self._values.get(name, 0) + count

    def put_one(self, size_bytes: int) -> None:
        """A put of a single block ended, which was stored."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            values["puts"] = values.get("puts", 0) + 1
            values["bytes_out"] = values.get("bytes_out", 0) + size_bytes

    def read(self, tiers: Mapping[int, int], size_bytes: int, misses: int) -> None:
        """A get ended: blocks read by the bit of the tier they came from, their bytes together, and blocks not found."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            for bit, count in tiers.items():
                values["hits"] = values.get("hits", 0) + count
                self._by_tier[bit] = self._by_tier.get(bit, 0) + count
            values["bytes_in"] = values.get("bytes_in", 0) + size_bytes
            values["misses"] = values.get("misses", 0) + misses

    def read_one(self, tier: int, size_bytes: int) -> None:
        """As `read`, of a single block that was found."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            values["hits"] = values.get("hits", 0) + 1
            values["bytes_in"] = values.get("bytes_in", 0) + size_bytes
            self._by_tier[tier] = self._by_tier.get(tier, 0) + 1

    def snapshot(self, calls: int = 0, hits: int = 0, size_bytes: int = 0, unheld: int = 0) -> ClientStats:
        """With what was read in shared memory, and what nodes of this host refused to hold there: it is counted there."""
        with self._lock:
            values: dict[str, Any] = dict(self._values)
            counted = {"requests": calls, "hits": hits, "bytes_in": size_bytes, "held_blocks": -unheld, "unheld_blocks": unheld}
            for name, more in counted.items():
                values[name] = values.get(name, 0) + more
            by_tier = {name: self._by_tier[bit] for name, bit in TIER_BITS.items()}
        by_tier["dram"] += hits
        return ClientStats(**values, hits_by_tier=by_tier)
