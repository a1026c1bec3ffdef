"""Counters add up over ranks and steps, and restart at zero when they are taken.

An outage is two lines of a log.
"""

import pytest

from kvstore.engines.vllm.counters import ConnectorCounters, FailureLog, metrics
from kvstore.protocol.errors import Full, Unauthorized, Unavailable


def test_they_add_up_and_begin_anew() -> None:
    counters = ConnectorCounters(lookups=1, load_s=0.5)
    counters.add(ConnectorCounters(lookups=2, saved_blocks=3))
    assert counters.take() == ConnectorCounters(lookups=3, load_s=0.5, saved_blocks=3)
    assert counters == ConnectorCounters()


def test_metrics_name_their_unit() -> None:
    names = {name: metric for name, metric, _ in metrics()}
    assert names["load_s"] == "vllm:kvstore_load_seconds"
    assert names["loaded_bytes"] == "vllm:kvstore_loaded_bytes"
    assert list(names) == list(ConnectorCounters().values())
    assert all(help.endswith(".") for _, _, help in metrics())


def test_it_is_told_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    failure = FailureLog("loading blocks", "they are computed")
    for error in (None, Unavailable("away"), Unavailable("away"), None, None, Unavailable("again")):
        failure.record(error)
    assert [record.getMessage() for record in caplog.records] == [
        "kvstore: loading blocks fails, they are computed: Unavailable: away",
        "kvstore: loading blocks works again, after 2 failures",
        "kvstore: loading blocks fails, they are computed: Unavailable: again",
    ]


def test_store_that_is_known_to_be_away_is_not_told_again(caplog: pytest.LogCaptureFixture) -> None:
    """Each rank would log what the scheduler's connector has logged."""
    failure = FailureLog("storing blocks", "they are dropped")
    for error in (Unavailable("away"), Unauthorized("who?"), Full("no room"), None):
        failure.record(error, is_store_unreachable=True)
    assert [record.getMessage() for record in caplog.records] == [
        "kvstore: storing blocks fails, they are dropped: Full: no room",
        "kvstore: storing blocks works again, after 1 failures",
    ]
