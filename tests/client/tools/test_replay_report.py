"""Promises of replay_report.py."""

import pytest
from rich.console import Console

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.tools.replay import ReplayCounts
from kvstore.client.tools.replay_report import ReplayReport, settled_status
from kvstore.protocol import control_pb2 as pb
from tests.client.embedded import embedded


def status(*evictions: int) -> pb.StatusReply:
    tiers = [
        pb.TierStatus(name="dram", capacity_bytes=100, used_bytes=50, blocks=5, evictions=count, hits=1, health="ok") for count in evictions
    ]
    return pb.StatusReply(nodes=[pb.NodeStatus(name=str(index), tiers=[tier]) for index, tier in enumerate(tiers)])


COUNTS = ReplayCounts(
    requests=2, blocks=8, prefix_hits=2, hits=3, stored=5, get_bytes=30, get_s=2.0, put_bytes=50, put_s=0.5, wrong_bytes=0, wrong_block=""
)
REPORT = ReplayReport(COUNTS, {"hbm": 0, "dram": 3}, status(1), status(4, 10), 10, 3.0)


def test_the_json_form_has_what_scripts_read() -> None:
    assert REPORT.as_dict() == {
        "requests": 2,
        "blocks": 8,
        "block_bytes": 10,
        "prefix_hit_ratio": 0.25,
        "hits": 3,
        "stored": 5,
        "wrong_bytes": 0,
        "hits_by_tier": {"hbm": 0, "dram": 3},
        "put_bytes_per_s": 100.0,
        "get_bytes_per_s": 15.0,
        "evictions": 13,
        "evictions_by_tier": {"dram": 13},
        "occupancy": {"dram": {"used_bytes": 100, "capacity_bytes": 200, "blocks": 10, "share": 0.5}},
        "seconds": 3.0,
    }


@pytest.mark.parametrize(("wrong_bytes", "said"), [(0, "0 wrong bytes"), (3, "3 wrong bytes")])
def test_the_table_says_the_ratio_and_whether_bytes_were_wrong(wrong_bytes: int, said: str) -> None:
    counts = ReplayCounts(requests=2, blocks=8, prefix_hits=2, wrong_bytes=wrong_bytes)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(ReplayReport(counts, {}, status(0), status(0), 10, 3.0).as_table())
    assert said in capture.get()
    assert "0.2500" in capture.get()


def test_a_settled_status_is_one_that_every_node_has_reported_since() -> None:
    with embedded() as cluster, Control(cluster.control_address, ClientSettings()) as control:
        found = settled_status(control)
        assert [node.state for node in found.nodes] == ["alive"]
        # A clock that leaps ahead: the deadline is over at the second look, whatever the heartbeats are.
        times = iter([0.0, 1e-9, 1e6])
        assert settled_status(control, clock=lambda: next(times), sleep=lambda seconds: None).nodes
