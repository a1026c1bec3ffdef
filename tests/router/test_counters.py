"""Promises of counters.py."""

import json

from kvstore.router.counters import Counters


def test_counts_are_plain_values_for_json() -> None:
    counters = Counters()
    counters.requests += 2
    counters.rejected["ttft"] += 1
    counters.routed_by_load["salt"] += 3
    shown = json.loads(json.dumps(counters.as_dict()))
    assert (shown["routed_by_load"], shown["token_mismatches"]) == ({"salt": 3}, 0)
    assert (shown["requests"], shown["rejected"], shown["active"]) == (2, {"ttft": 1}, 0)
