"""Promises of status_tables.py."""

import re

import pytest
from rich.console import Console, RenderableType

from kvstore.cli.tools.status_tables import nodes_table, status_lines, tiers_table
from kvstore.cli.tools.tables import bar, duration
from kvstore.protocol import control_pb2 as pb

DRAM = pb.TierStatus(
    name="dram", capacity_bytes=8 << 20, used_bytes=6 << 20, blocks=1500, hits=40, evictions=1234, evicted_age_s=125.0, health="ok"
)
STATUS = pb.StatusReply(
    version="1.2.3",
    epoch=5,
    uptime_s=61,
    catalog="memory:",
    catalog_health="ok",
    blocks=1500,
    reserved=2,
    pinned=3,
    rss_bytes=64 << 20,
    counters={"lookup_misses": 50},
    nodes=[
        pb.NodeStatus(
            node_id=2,
            name="b",
            state="dead",
            tcp="10.0.0.2:7",
            tiers=[pb.TierStatus(name="nvme", capacity_bytes=0, health="no space left")],
        ),
        pb.NodeStatus(
            node_id=1,
            name="a",
            state="alive",
            unix="/run/a.sock",
            blocks=1500,
            heartbeat_age_s=0.25,
            counters={"misses": 10, "table_bytes": 3 << 20, "max_table_bytes": 64 << 20},
            tiers=[DRAM],
        ),
    ],
)


def text(renderable: RenderableType, width: int = 120) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, "········"), (1.0, "████████"), (0.5, "████····"), (0.52, "████▏···"), (-1.0, "········"), (7.0, "████████")]
)
def test_a_bar_shows_its_share_to_an_eighth_of_a_column(share: float, drawn: str) -> None:
    assert bar(share, 8).plain == drawn


def test_a_bar_turns_red_where_eviction_begins() -> None:
    assert [bar(share, 8).spans[0].style for share in (0.5, 0.8, 0.96)] == ["green", "yellow", "red"]


@pytest.mark.parametrize(("seconds", "shown"), [(42.9, "42 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (273_600, "3 d 4 h")])
def test_durations_have_two_units_at_most(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_status_names_what_an_operator_looks_for_first() -> None:
    shown = text(status_lines(STATUS))
    for fact in ("version 1.2.3, epoch 5, up 1 min 1 s", "memory: ok", "64 MiB", "1,500 published", "3 pinned", "1 of 2 alive"):
        assert fact in shown


def test_status_shows_partitions_and_the_console() -> None:
    owners = [pb.CatalogOwner(name="m1", address="m1:7440"), pb.CatalogOwner()]
    shown = text(status_lines(pb.StatusReply(catalog="etcd://e:1", partitions=2, owners=owners, http="m1:7442")))
    assert "2 of the key space: m1 1, 1 without an owner" in shown
    assert "console" in shown
    assert "http://m1:7442/" in shown


def test_status_shows_shared_memory_if_probed() -> None:
    assert "n1: no, permission denied" in text(status_lines(STATUS, "n1: no, permission denied"))
    assert "shared here" not in text(status_lines(STATUS))


def test_status_names_the_slowest_of_the_ways_that_were_measured() -> None:
    status = pb.StatusReply(
        nodes=[
            pb.NodeStatus(
                node_id=1, name="a", rates=[pb.PeerRate(node_id=2, bytes_per_s=3 << 20), pb.PeerRate(node_id=9, bytes_per_s=5 << 20)]
            ),
            pb.NodeStatus(node_id=2, name="b"),
        ]
    )
    assert "2 paths between nodes, the slowest b to a at 3 MiB/s" in text(status_lines(status))
    del status.nodes[0].rates[0]
    assert "1 path between nodes, the slowest node 9 to a at 5 MiB/s" in text(status_lines(status))
    assert "measured" not in text(status_lines(STATUS))


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([(8, "")], "8 MiB of 8 MiB of DRAM"),
        ([(6, ""), (0, "shmem_enabled is never")], "6 MiB of 16 MiB of DRAM; shmem_enabled is never (1 node): run kvstore doctor there"),
        ([(0, "b"), (0, "a"), (0, "b")], "0 B of 24 MiB of DRAM; a (1 node), b (2 nodes): run kvstore doctor there"),
    ],
)
def test_status_shows_huge_pages_and_reasons(found: list[tuple[int, str]], line: str) -> None:
    tiers = [pb.TierStatus(name="dram", capacity_bytes=8 << 20, huge_bytes=mib << 20, not_huge_reason=reason) for mib, reason in found]
    status = pb.StatusReply(
        nodes=[pb.NodeStatus(state="alive", tiers=[tier, pb.TierStatus(name="nvme", capacity_bytes=99)]) for tier in tiers]
    )
    assert line in " ".join(text(status_lines(status)).split())


def test_nodes_are_shown_by_name_with_a_way_to_reach_them() -> None:
    rows = text(nodes_table(STATUS)).splitlines()[1:]
    assert [row.split()[:4] for row in rows] == [["a", "1", "alive", "/run/a.sock"], ["b", "2", "dead", "10.0.0.2:7"]]
    assert "dram 8 MiB" in rows[0]
    assert "3 MiB of 64 MiB" in rows[0]


def test_drained_nodes_are_named_and_how_far_they_are() -> None:
    drained = pb.StatusReply(
        nodes=[
            pb.NodeStatus(name="a", state="alive", drain=pb.DrainStatus(remaining_blocks=1200)),
            pb.NodeStatus(name="b", state="dead", drain=pb.DrainStatus(is_done=True)),
        ]
    )
    assert "drained a, b" in " ".join(text(status_lines(drained)).split())
    assert "alive, draining: 1,200 left" in text(nodes_table(drained))
    assert "dead, drained" in text(nodes_table(drained))
    assert "drained" not in text(status_lines(STATUS))


def test_a_tier_shows_bytes_blocks_hit_ratio_and_evictions() -> None:
    row = text(tiers_table(STATUS)).splitlines()[1]
    assert "████▌·" in row
    assert row.split()[-12:] == ["MiB", "8", "MiB", "1,500", "40.0", "%", "1,234", "2", "min", "5", "s", "-"]


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_terminal_loses_no_name_or_figure_of_a_tier(width: int) -> None:
    """Columns without wrapping took the place of the names, and were cut themselves: 64 MiB was shown as 64 M."""
    shown, whole = (sorted(re.sub("[ \n█▌·]", "", text(tiers_table(STATUS), columns))) for columns in (width, 120))
    assert shown == whole


@pytest.mark.parametrize(
    ("victim", "shown"),
    [
        (pb.NextVictim(unread_s=42), "42 s"),
        (pb.NextVictim(unread_s=185, reason="secondary"), "3 min 5 s, secondary"),
        (pb.NextVictim(unread_s=7800, hits_per_byte_s=2e-10), "2 h 10 min, 0.215 hits/s a GiB"),
    ],
)
def test_tiers_show_what_they_evict_next(victim: pb.NextVictim, shown: str) -> None:
    tier = pb.TierStatus(name="dram", capacity_bytes=8, health="ok", next_victim=victim)
    status = pb.StatusReply(catalog="memory:", nodes=[pb.NodeStatus(name="a", state="alive", tiers=[tier])])
    assert text(tiers_table(status)).splitlines()[1].endswith(f"  {shown}")


def test_status_shows_what_moved_and_why() -> None:
    tier = pb.TierStatus(name="dram", demotions=7, evictions_by_reason={"room": 1000, "secondary": 30, "worth": 0})
    counters = {"copied_blocks_home": 0, "copied_blocks_hot": 4, "secondary_blocks": 1500, "prefetched_blocks": 2}
    status = pb.StatusReply(
        counters={"home_copies": 1500, "home_copied_bytes": 3 << 20, "home_copies_skipped_gone": 5, "home_copies_skipped_space": 1},
        nodes=[
            pb.NodeStatus(name="a", state="alive", tiers=[tier], counters=counters),
            pb.NodeStatus(name="b", state="alive", counters={"copied_blocks_home": 600}),
            pb.NodeStatus(name="c", state="alive", counters={"copied_blocks_home": 900}),
        ],
    )
    shown = " ".join(text(status_lines(status)).split())
    assert "home copies 1,500 blocks, 3 MiB, from nodes that were nearly full; from a 1,500; to c 900, b 600;" in shown
    assert "6 not copied: 5 had left the writer's node before, 1 their home had no space" in shown
    assert "moved 4 copied because many hosts read them, 7 demoted to a slower tier, 2 prefetched into DRAM evicted" in shown
    assert "evicted 1,030 blocks: 1,000 the tier was full, 30 the home node keeps them" in shown
    assert "moved" not in " ".join(text(status_lines(pb.StatusReply())).split())


def test_status_shows_the_share_of_local_hits() -> None:
    nodes = [pb.NodeStatus(state="alive", counters={"local_reads": 40, "remote_reads": count}) for count in (0, 20)]
    assert "local hits 80.0 % of 100 blocks were read on the reader's host" in " ".join(
        text(status_lines(pb.StatusReply(nodes=nodes))).split()
    )
    assert "local hits" not in text(status_lines(pb.StatusReply(nodes=nodes[:1])))


def test_a_failing_tier_a_dead_node_and_absent_hbm_are_said() -> None:
    shown = text(tiers_table(STATUS))
    assert re.search("^nvme of [ab]: no space left", shown, re.MULTILINE)
    assert "b is dead" in shown
    assert "a has no HBM tier" in shown


KIB = 1 << 10
QUANTISED = pb.TierStatus(
    name="nvme",
    capacity_bytes=8 << 20,
    used_bytes=500 * KIB,
    health="ok",
    codec="int4/64",
    logical_bytes=1100 * KIB,
    payload_bytes=160 * KIB,
    metadata_bytes=40 * KIB,
    elements=320 * KIB,
)


def with_tier(tier: pb.TierStatus) -> pb.StatusReply:
    found = pb.StatusReply()
    found.CopyFrom(STATUS)
    found.nodes[1].tiers.append(tier)
    return found


def test_encoded_table_has_sizes_and_bits_per_element() -> None:
    shown = text(tiers_table(with_tier(QUANTISED)))
    row = next(line for line in shown.splitlines() if "int4/64" in line)
    assert row.split() == ["a", "nvme", "int4/64", "1.1", "MiB", "200", "KiB", "160", "KiB", "40", "KiB", "5.00"]
    assert "int4/64: 200 KiB for 800 KiB of values, 5.00 bits an element" in text(status_lines(with_tier(QUANTISED)))


def test_who_is_no_operator_is_told_so_and_shown_no_zeros() -> None:
    seen = pb.StatusReply(version="1.2.3", catalog_health="ok", nodes=[pb.NodeStatus(node_id=1, name="a", state="alive")])
    shown = " ".join(text(status_lines(seen)).split())
    assert "sizes, counts and rates are for operators only" in shown
    assert "1 of 1 alive" in shown
    for hidden in ("published", "in the master", "moved", "DRAM"):
        assert hidden not in shown
    for table in (nodes_table, tiers_table):
        assert "for operators only" in " ".join(text(table(seen)).split())
        assert "for operators only" not in text(table(STATUS))
