"""Promises of quota_table.py."""

from rich.console import Console

from kvstore.client.tools.quota_table import Row, limit_shown, quota_table, rows
from kvstore.protocol import control_pb2 as pb

STATUS = pb.StatusReply(
    nodes=[
        pb.NodeStatus(name="n2", tenants=[pb.TenantUse(tenant="red", dram_bytes=1024, blocks=2, connections=1)]),
        pb.NodeStatus(name="n1", tenants=[pb.TenantUse(tenant="blue", nvme_bytes=5, dram_slabs=3)]),
    ],
    quotas=pb.Quotas(default=pb.TenantQuota(blocks=9), tenants={"red": pb.TenantQuota(dram_bytes=1024, pins=3)}),
    quota_origins={"red": pb.QuotaOrigins(operator=["pins", "connections"], file=["dram_bytes"])},
    grants=[pb.TenantGrants(tenant="red", pins=2, reservations=1)],
)


def test_each_tenant_has_a_row_for_what_it_uses_and_for_what_is_limited_at_each_daemon() -> None:
    assert rows(STATUS) == [
        Row("blue", "n1", "nvme_bytes", 5, None, ""),
        Row("blue", "n1", "dram_slabs", 3, None, ""),
        Row("blue", "n1", "blocks", 0, 9, "default"),
        Row("red", "n1", "dram_bytes", 0, 1024, "file"),
        Row("red", "n1", "connections", 0, None, "operator"),
        Row("red", "n2", "dram_bytes", 1024, 1024, "file"),
        Row("red", "n2", "blocks", 2, None, ""),
        Row("red", "n2", "connections", 1, None, "operator"),
        Row("red", "master", "pins", 2, 3, "operator"),
        Row("red", "master", "reservations", 1, None, ""),
        Row("red", "master", "connections", 0, None, "operator"),
    ]


def test_a_tenant_that_has_nothing_yet_shows_what_it_may_have_of_the_master_and_one_of_an_older_master_shows_no_origin() -> None:
    status = pb.StatusReply(quotas=pb.Quotas(tenants={"red": pb.TenantQuota(pins=3)}))
    assert rows(status) == [Row("red", "master", "pins", 0, 3, "")]


def test_the_table_shows_sizes_as_sizes_and_no_limit_as_a_dash() -> None:
    console = Console(width=100, record=True, file=None, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(quota_table(rows(STATUS)))
    lines = [line.split() for line in captured.get().splitlines()]
    assert lines[0] == ["tenant", "at", "what", "used", "quota", "set", "by"]
    assert ["red", "n2", "dram_bytes", "1", "KiB", "1", "KiB", "file"] in lines
    assert ["blue", "n1", "nvme_bytes", "5", "B", "-", "-"] in lines
    assert limit_shown("pins", None) == "none"
