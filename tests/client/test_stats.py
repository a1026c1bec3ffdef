"""Counters."""

from kvstore.client.stats import ClientStats, Counters


def test_a_new_client_has_done_nothing() -> None:
    assert Counters().snapshot() == ClientStats(hits_by_tier={"hbm": 0, "dram": 0, "nvme": 0})


def test_counters_add_up() -> None:
    counters = Counters()
    counters.add(requests=1, misses=2)
    counters.add(requests=1)
    counters.read({2: 3, 4: 1}, 100, misses=1)
    counters.read_one(2, 10)
    counters.put_one(7)
    stats = counters.snapshot()
    assert (stats.requests, stats.misses, stats.hits, stats.bytes_in) == (5, 3, 5, 110)
    assert (stats.puts, stats.bytes_out) == (1, 7)
    assert stats.hits_by_tier == {"hbm": 0, "dram": 4, "nvme": 1}


def test_a_snapshot_does_not_change() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.read({2: 1}, 1, misses=0)
    assert (before.hits, before.hits_by_tier["dram"]) == (0, 0)
