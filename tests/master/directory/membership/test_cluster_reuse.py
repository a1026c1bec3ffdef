"""Tests of cluster_reuse.py: the sums of others, what leaves them, and what is ignored."""

import math

import numpy as np
import pytest

from kvstore.master.directory.membership.cluster_reuse import MAX_TENANT_CHARS, ClusterReuse
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.message import MAX_REUSE_TENANTS
from kvstore.tiers.policies.prefix.reuse_hazard import BUCKETS
from kvstore.tiers.policies.prefix.visits import CLASSES
from kvstore.tiers.policies.reuse_statistics import MAX_OBSERVATIONS, ReuseStatistics


def counted(reads: float) -> bytes:
    """Statistics of that many reads, in 4 cells."""
    readings = np.zeros((CLASSES, BUCKETS))
    readings[:2, :2] = reads / 4
    return ReuseStatistics(readings, readings * 100, np.array([reads, reads])).pack()


def report(reads: float = 4.0, *, tenant: str = "red") -> pb.ReuseReport:
    return pb.ReuseReport(tenants=[pb.TenantReuse(tenant=tenant, statistics=counted(reads))])


def reads_in(answer: pb.ReuseReport) -> list[float]:
    return [round(float(ReuseStatistics.unpack(one.statistics, CLASSES).readings.sum()), 3) for one in answer.tenants]


@pytest.fixture
def reuse() -> ClusterReuse:
    return ClusterReuse()


def test_answer_is_the_sum_of_the_others(reuse: ClusterReuse) -> None:
    assert reads_in(reuse.take(1, report(1))) == []
    assert reads_in(reuse.take(2, report(2))) == [1]
    assert reads_in(reuse.take(3, report(4))) == [3]
    assert reads_in(reuse.take(1, report(8))) == [6]
    assert reads_in(reuse.take(1, report(8))) == [6], "a repeated report changes nothing"
    assert reads_in(reuse.take(2, report(2))) == [12]


def test_tenants_are_not_summed(reuse: ClusterReuse) -> None:
    reuse.take(1, report())
    assert reads_in(reuse.take(2, report(tenant="blue"))) == []


def test_a_node_that_left_is_dropped(reuse: ClusterReuse) -> None:
    for node_id in (1, 2, 3):
        reuse.take(node_id, report())
    reuse.keep([1, 3])
    assert reads_in(reuse.take(1, report())) == [4]
    reuse.keep([1])
    assert reads_in(reuse.take(1, report())) == []
    reuse.keep([])
    assert len(reuse) == 0


def test_a_tenant_that_a_node_no_longer_reports_is_dropped(reuse: ClusterReuse) -> None:
    reuse.take(1, report())
    reuse.take(1, pb.ReuseReport())
    assert reads_in(reuse.take(2, report())) == []


def test_tenants_of_a_node_are_bounded(reuse: ClusterReuse) -> None:
    many = pb.ReuseReport(tenants=[report(tenant=f"tenant-{number}").tenants[0] for number in range(MAX_REUSE_TENANTS + 5)])
    for _ in range(3):
        reuse.take(1, many)
    assert len(reuse) == MAX_REUSE_TENANTS
    assert reuse.refused == 3 * 5


@pytest.mark.parametrize(
    "hostile",
    [
        pb.ReuseReport(tenants=[pb.TenantReuse(statistics=b"short")]),
        pb.ReuseReport(tenants=[pb.TenantReuse(statistics=np.full(2 * CLASSES * BUCKETS + 2, math.nan, "<f4").tobytes())]),
        pb.ReuseReport(tenants=[pb.TenantReuse(statistics=np.full(2 * CLASSES * BUCKETS + 2, -1, "<f4").tobytes())]),
        report(tenant="x" * (MAX_TENANT_CHARS + 1)),
    ],
)
def test_impossible_statistics_are_ignored_and_counted(reuse: ClusterReuse, hostile: pb.ReuseReport) -> None:
    reuse.take(1, report())
    assert reads_in(reuse.take(2, hostile)) == []
    assert (reuse.refused, len(reuse)) == (1, 1)
    assert reads_in(reuse.take(3, report())) == [4]


def test_no_node_outweighs_the_others(reuse: ClusterReuse) -> None:
    reuse.take(1, report(1e30))
    reuse.take(2, report(100))
    (reads,) = reads_in(reuse.take(3, report()))
    assert reads <= MAX_OBSERVATIONS * (1 + 1e-5)
