"""Promises of alerts.py: each is named once, and says what is wrong and what to do."""

import re

from kvstore.telemetry.metrics.alerts import ALERTS


def test_each_is_named_once_and_says_what_to_do() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        assert re.fullmatch(r"Kvstore([A-Z][a-z]+)+", alert.name)
        assert re.fullmatch(r"[0-9]+[sm]", alert.hold), alert
        assert alert.summary.endswith("."), alert
        assert alert.action.endswith((".", "?")), alert
