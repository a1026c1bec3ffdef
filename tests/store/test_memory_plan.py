"""Tests of memory_plan.py: division of a node's memory, and the check against a memory limit."""

from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size
from kvstore.store.config import NodeSettings
from kvstore.store.memory_plan import TORCH_BYTES, check_limit, plan_memory
from kvstore.tiers.memory_limit import MemoryLimit

MIB, GIB = 1 << 20, 1 << 30
LIMIT = MemoryLimit(576 * MIB, "/sys/fs/cgroup/memory/w/memory.limit_in_bytes")


def settings(**given: Any) -> NodeSettings:
    return NodeSettings(memory=Size(given.pop("memory", 0)), dram=Size(given.pop("dram", 0)), **given)


def test_memory_plan_includes_lower_tiers() -> None:
    alone = plan_memory(settings()).process_bytes
    nvme = plan_memory(settings(nvme="/d:1GiB")).process_bytes
    assert nvme - alone == (256 + 2 * 8) * MIB
    assert plan_memory(settings(nvme="/d:1GiB", nvme_codec="int8")).process_bytes == nvme + TORCH_BYTES
    assert plan_memory(settings(hbm="cuda:0:1GiB")).process_bytes == nvme + TORCH_BYTES


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 3.0])
@pytest.mark.parametrize("memory", [256 * MIB, 576 * MIB, 5 * GIB, 300 * GIB])
def test_memory_is_divided_whole_and_never_exceeded(memory: int, share: float) -> None:
    plan = plan_memory(settings(memory=memory, table_share=share))
    assert 0.99 * memory - 4 * MIB < plan.total_bytes <= memory
    assert plan == plan_memory(settings(dram=plan.dram_bytes, table_share=share)), "the same as with the DRAM tier that it comes to"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"memory": GIB, "dram": GIB}, "memory and dram are both given"),
        ({"memory": 128 * MIB}, r"memory of 128 MiB leaves nothing for values: .* take 178.0 MiB; give at least 180 MiB"),
        ({"dram": 100}, "dram is 100 B: give at least 4 KiB"),
    ],
)
def test_memory_that_cannot_be_divided_is_refused(given: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_memory(settings(**given))


@pytest.mark.promise("memory-bounded")
def test_memory_plan_above_the_limit_is_refused_with_advice() -> None:
    given = settings(dram=512 * MIB)
    with pytest.raises(ConfigError) as refused:
        check_limit(given, plan_memory(given), LIMIT, has_reserved_pages=False)
    fitting = plan_memory(settings(memory=LIMIT.limit_bytes)).dram_bytes // MIB
    assert str(refused.value) == (
        "the node may take 936.9 MiB = 512 MiB DRAM tier + 256 MiB block table + 71.9 MiB shared-memory index + 97 MiB process; "
        f"the memory limit is 576 MiB (/sys/fs/cgroup/memory/w/memory.limit_in_bytes): give memory 576 MiB in place of dram, "
        f"which makes a DRAM tier of "
        f"{fitting} MiB, or raise the limit to 937 MiB, or lower dram or table_share"
    )


def test_values_in_reserved_huge_pages_do_not_count() -> None:
    given = settings(dram=512 * MIB, hugepages=True)
    check_limit(given, plan_memory(given), LIMIT, has_reserved_pages=True)
    with pytest.raises(ConfigError, match="or lower dram or table_share"):
        check_limit(given, plan_memory(given), LIMIT, has_reserved_pages=False)
    with pytest.raises(ConfigError, match="in reserved huge pages and does not count"):
        check_limit(given, plan_memory(given), MemoryLimit(100 * MIB, "memory.max"), has_reserved_pages=True)
