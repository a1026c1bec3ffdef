"""Division of a node's memory into values, block table, shared-memory index and process, and the check against the
memory limit.

`memory` sets the sum and the node divides it. Otherwise `dram` and `table_share` set two parts, and the sum follows.
"""

from dataclasses import dataclass, replace
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size, format_size
from kvstore.store.block_table.quotas import most_index_bytes
from kvstore.store.config import NodeSettings
from kvstore.tiers.memory_limit import MemoryLimit

DEFAULT_DRAM_BYTES: Final = 1 << 30
MIN_DRAM_BYTES: Final = 4096
MIN_TABLE_BYTES: Final = 64 << 20
"""Lower bound of the table: a store of a few MiB also keeps small blocks."""
PROCESS_BYTES: Final = 96 << 20
"""Interpreter and libraries (67 MiB measured at rest, 28 of them files), requests, and connections (30 MiB for 1,000,
including the kernel's share)."""
TORCH_BYTES: Final = 256 << 20
"""torch, if a codec or a tier needs it: 230 MiB measured with the CPU build."""
BYTES_PER_PAGE_TABLE_BYTE: Final = 512
"""The kernel uses 8 bytes for each mapped page of 4 KiB."""
STEP_BYTES: Final = 1 << 20
"""The planned DRAM tier is a multiple of this."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Limits of the parts, in bytes."""

    dram_bytes: int
    table_bytes: int
    process_bytes: int

    @property
    def index_bytes(self) -> int:
        """Shared-memory index of as many blocks as the table holds."""
        return most_index_bytes(self.table_bytes)

    @property
    def total_bytes(self) -> int:
        return self.dram_bytes + self.table_bytes + self.index_bytes + self.process_bytes

    def __str__(self) -> str:
        parts = {
            "DRAM tier": self.dram_bytes,
            "block table": self.table_bytes,
            "shared-memory index": self.index_bytes,
            "process": self.process_bytes,
        }
        return f"{format_size(self.total_bytes)} = " + " + ".join(f"{format_size(size)} {name}" for name, size in parts.items())


def plan_memory(settings: NodeSettings) -> MemoryPlan:
    """Raises ConfigError: `memory` and `dram` are both given, or values get less than their minimum."""
    if 0 < settings.dram < MIN_DRAM_BYTES:
        raise ConfigError(f"dram is {format_size(settings.dram)}: give at least {format_size(MIN_DRAM_BYTES)}")
    if not settings.memory:
        return _plan(settings, settings.dram or DEFAULT_DRAM_BYTES)
    if settings.dram:
        raise ConfigError("memory and dram are both given: leave out one; memory includes the DRAM tier")
    least = _plan(settings, 0)
    dram_bytes = (settings.memory - least.total_bytes) * BYTES_PER_PAGE_TABLE_BYTE // (BYTES_PER_PAGE_TABLE_BYTE + 1)
    if settings.table_share * dram_bytes > MIN_TABLE_BYTES:
        table_share = settings.table_share * (1 + most_index_bytes(1 << 40) / (1 << 40))
        dram_bytes = int((settings.memory - least.process_bytes) / (1 + 1 / BYTES_PER_PAGE_TABLE_BYTE + table_share))
    dram_bytes = dram_bytes // STEP_BYTES * STEP_BYTES
    if dram_bytes < STEP_BYTES:
        raise ConfigError(
            f"memory of {format_size(settings.memory)} leaves nothing for values: block table, shared-memory index and process take "
            f"{format_size(least.total_bytes)}; give at least {_rounded_up(least.total_bytes + 2 * STEP_BYTES)}"
        )
    return _plan(settings, dram_bytes)


def check_limit(settings: NodeSettings, plan: MemoryPlan, limit: MemoryLimit | None, *, has_reserved_pages: bool) -> None:
    """Raises ConfigError if the plan exceeds the memory limit: the kernel would kill the node once it is full. Values
    in reserved huge pages do not count (`has_reserved_pages`)."""
    counted_bytes = plan.total_bytes - (plan.dram_bytes if has_reserved_pages else 0)
    if limit is None or counted_bytes <= limit.limit_bytes:
        return
    left_out = ", of which the DRAM tier is in reserved huge pages and does not count" if has_reserved_pages else ""
    raise ConfigError(
        f"the node may take {plan}{left_out}; the memory limit is {limit}: {_mend(settings, limit.limit_bytes)}"
        f"raise the limit to {_rounded_up(counted_bytes)}, or lower {'memory' if settings.memory else 'dram or table_share'}"
    )


def _mend(settings: NodeSettings, limit_bytes: int) -> str:
    """Suggest a `memory` setting that fits the limit."""
    if settings.memory or settings.hugepages:
        return ""
    try:
        fitting = plan_memory(replace(settings, memory=Size(limit_bytes), dram=Size(0)))
    except ConfigError:
        return ""
    return f"give memory {format_size(limit_bytes)} in place of dram, which makes a DRAM tier of {format_size(fitting.dram_bytes)}, or "


def _plan(settings: NodeSettings, dram_bytes: int) -> MemoryPlan:
    table_bytes = max(MIN_TABLE_BYTES, int(dram_bytes * settings.table_share))
    process_bytes = PROCESS_BYTES + dram_bytes // BYTES_PER_PAGE_TABLE_BYTE
    if settings.nvme or settings.hbm:
        process_bytes += settings.read_bytes + settings.write_threads * settings.move_batch
    if settings.hbm or settings.nvme_codec != "none":
        process_bytes += TORCH_BYTES
    return MemoryPlan(dram_bytes, table_bytes, process_bytes)


def _rounded_up(size_bytes: int) -> str:
    return format_size(-(-size_bytes // STEP_BYTES) * STEP_BYTES)
