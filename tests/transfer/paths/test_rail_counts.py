"""Promises of rail_counts.py."""

from kvstore.transfer.paths.choice import Path
from kvstore.transfer.paths.rail_counts import RailCount, RailCounts


def test_paths_to_all_peers_by_one_rail_are_counted_together() -> None:
    counts = RailCounts()
    counts.delivered(Path("tcp", "eth0", "eth0"), 10)
    counts.delivered(Path("tcp", "eth0", "eth1"), 5)
    counts.failed(Path("tcp", "eth0", "eth1"), rests=True)
    counts.failed(Path("tcp", "eth0", "eth1"), rests=False)
    counts.delivered(Path("ucx", "eth0", "eth0"), 1)
    found = counts.read()
    assert found == {("tcp", "eth0"): RailCount(15, 2, 2, 1), ("ucx", "eth0"): RailCount(1, 1)}
    counts.delivered(Path("ucx", "eth0", "eth0"), 1)
    assert found["ucx", "eth0"].delivered_bytes == 1, "what was read stays as it was"
