"""Promises of measures.py: what the log is told of evictions, and when. What metrics tell: tests/system/test_metrics.py."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.store.measures import EVICTIONS_LOG_NS, NodeMeasures, log
from tests.store.tables import Store

S = 1_000_000_000


class Unsorted(int):
    """The last access to a block that was evicted: it may be looked up in a clock, and not be sorted among its like."""

    def __lt__(self, other: Any) -> bool:
        assert not isinstance(other, Unsorted), "sorted, and nobody is told"
        return int(self) < int(other)


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(1 << 20)
    yield store
    store.close()


def evict(store: Store, *accesses: int) -> None:
    [(_, _, counts, _)] = store.table.levels()
    for access in accesses:
        counts.evict(access)


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the lines about evictions say, since this was asked last."""
    fields = [vars(record)["fields"] for record in caplog.records if vars(record).get("event") == "blocks_evicted"]
    caplog.clear()
    return fields


def test_the_log_is_told_of_evictions_at_most_once_a_minute_and_of_all_of_them(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, log.name)
    measures = NodeMeasures()
    measures.tick(store.table, 0)
    assert told(caplog) == []
    store.put("one access")
    evict(store, 0, 0, 0)
    measures.tick(store.table, 5 * S)
    assert told(caplog) == [{"tier": "dram", "blocks": 3, "for_table": 0, "for_quota": 0, "median_age_s": 5.0}]
    evict(store, Unsorted(0), Unsorted(0))
    measures.tick(store.table, 6 * S)
    assert told(caplog) == []
    evict(store, 0)
    [(_, _, counts, _)] = store.table.levels()
    counts.quota_evictions += 1
    measures.tick(store.table, 5 * S + EVICTIONS_LOG_NS)
    assert told(caplog) == [{"tier": "dram", "blocks": 3, "for_table": 0, "for_quota": 1, "median_age_s": 65.0}]


def test_a_log_that_takes_no_such_lines_costs_no_sorting_and_hears_of_all_once_it_does(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, log.name)
    measures = NodeMeasures()
    evict(store, Unsorted(0), Unsorted(0))
    measures.tick(store.table, 0)
    caplog.set_level(logging.INFO, log.name)
    evict(store, 0)
    measures.tick(store.table, 2 * S)
    assert [line["blocks"] for line in told(caplog)] == [3]
