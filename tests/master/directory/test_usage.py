"""Tests of `usage` in index/contents.py, against sums made one block at a time."""

import random

import pytest

from kvstore.master.directory.index.contents import BlockUsage, TierUsage, usage
from tests.master.blocks import DRAM, NVME, TENANT, Event, one_node
from tests.master.directory.index.test_contents import copy

HBM = 1


@pytest.mark.promise("observable")
def test_usage_is_by_namespace_and_fastest_tier() -> None:
    master, node = one_node()
    chosen, wanted = random.Random(3), dict[tuple[str, str], list[int]]()
    events = []
    for number in range(200):
        tiers = chosen.choice((HBM, HBM | DRAM, DRAM, NVME, DRAM | NVME, 0))
        event = Event(
            number.to_bytes(2, "big"),
            size=chosen.randrange(1, 1 << 40),
            tiers=tiers,
            tenant=chosen.choice("rgb"),
            namespace=chosen.choice("xyz"),
        )
        events.append(event)
        sums = wanted.setdefault((event.tenant, event.namespace), [0, 0, 0, 0, 0])
        sums[0] += 1
        sums[1 if tiers & HBM else 2 if tiers & DRAM else 3 if tiers & NVME else 4] += event.size
    master.publish(node, *events)
    found = usage(copy(master), None, limit=100)
    assert {(one.tenant, one.namespace): [one.held.blocks, *one.held.tiers] for one in found} == wanted
    assert [one.held.size_bytes for one in found] == sorted((sum(sums[1:]) for sums in wanted.values()), reverse=True)
    assert usage(copy(master), None, limit=2) == found[:2]
    assert usage(copy(master), "r", limit=100) == [one for one in found if one.tenant == "r"]


def test_pins_are_told_of_the_tenant_that_has_them() -> None:
    master, _node = one_node(b"a", b"b")
    master.directory.pins.pin(TENANT, [b"a"], pinned=True)
    assert usage(copy(master), TENANT, limit=9) == [BlockUsage(TENANT, "ns", TierUsage(2, (0, 200, 0, 0)), pinned=1)]
