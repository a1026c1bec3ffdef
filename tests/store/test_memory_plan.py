"""How a node's memory is divided, and which plans a memory limit allows."""

from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import Size
from kvstore.store.blocks.quotas import INDEX_BYTES, most_blocks
from kvstore.store.config import NodeSettings
from kvstore.store.memory_plan import MIN_TABLE_BYTES, PROCESS_BYTES, TORCH_BYTES, MemoryPlan, check_limit, plan_memory
from kvstore.tiers.memory_limit import MemoryLimit

MIB, GIB = 1 << 20, 1 << 30
LIMIT = MemoryLimit(576 * MIB, "/sys/fs/cgroup/memory/w/memory.limit_in_bytes")


def settings(**given: Any) -> NodeSettings:
    return NodeSettings(memory=Size(given.pop("memory", 0)), dram=Size(given.pop("dram", 0)), **given)


def test_table_is_a_share_of_dram_and_no_less_than_its_minimum() -> None:
    assert plan_memory(settings(dram=8 * GIB, table_share=0.25)).table_bytes == 2 * GIB
    assert plan_memory(settings(dram=MIB)).table_bytes == plan_memory(settings(table_share=0)).table_bytes == MIN_TABLE_BYTES
    assert plan_memory(settings()).dram_bytes == GIB


def test_sum_has_the_index_of_all_blocks_that_the_table_holds() -> None:
    plan = plan_memory(settings(dram=8 * GIB))
    assert plan.index_bytes == most_blocks(plan.table_bytes) * INDEX_BYTES
    assert plan.total_bytes == plan.dram_bytes + plan.table_bytes + plan.index_bytes + plan.process_bytes
    assert plan.process_bytes == PROCESS_BYTES + 16 * MIB, "page tables of 8 GiB"


def test_lower_tiers_add_what_their_reads_writes_and_libraries_take() -> None:
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


def test_least_memory_that_is_named_is_enough() -> None:
    assert plan_memory(settings(memory=180 * MIB)).dram_bytes >= MIB


def test_plan_within_the_limit_is_taken() -> None:
    plan = MemoryPlan(dram_bytes=400 * MIB, table_bytes=64 * MIB, process_bytes=90 * MIB)
    check_limit(settings(dram=400 * MIB), plan, LIMIT, has_reserved_pages=False)
    check_limit(settings(dram=400 * GIB), plan_memory(settings(dram=400 * GIB)), None, has_reserved_pages=False)


def test_plan_above_the_limit_is_refused_with_its_sum_and_a_way_out() -> None:
    given = settings(dram=512 * MIB)
    with pytest.raises(ConfigError) as refused:
        check_limit(given, plan_memory(given), LIMIT, has_reserved_pages=False)
    fitting = plan_memory(settings(memory=LIMIT.limit_bytes)).dram_bytes // MIB
    assert str(refused.value) == (
        "the node may take 936.9 MiB = 512 MiB DRAM tier + 256 MiB block table + 71.9 MiB shared index + 97 MiB process; the memory limit "
        f"is 576 MiB (/sys/fs/cgroup/memory/w/memory.limit_in_bytes): give memory 576 MiB in place of dram, which makes a DRAM tier of "
        f"{fitting} MiB, or raise the limit to 937 MiB, or lower dram or table_share"
    )


def test_refusal_names_no_memory_where_none_would_do() -> None:
    for given, limit_bytes in ((settings(dram=512 * MIB), 100 * MIB), (settings(memory=GIB), 576 * MIB)):
        with pytest.raises(ConfigError, match=r"memory.max\): raise the limit to"):
            check_limit(given, plan_memory(given), MemoryLimit(limit_bytes, "memory.max"), has_reserved_pages=False)


def test_values_in_reserved_huge_pages_do_not_count() -> None:
    given = settings(dram=512 * MIB, hugepages=True)
    check_limit(given, plan_memory(given), LIMIT, has_reserved_pages=True)
    with pytest.raises(ConfigError, match="or lower dram or table_share"):
        check_limit(given, plan_memory(given), LIMIT, has_reserved_pages=False)
    with pytest.raises(ConfigError, match="in reserved huge pages and does not count"):
        check_limit(given, plan_memory(given), MemoryLimit(100 * MIB, "memory.max"), has_reserved_pages=True)
