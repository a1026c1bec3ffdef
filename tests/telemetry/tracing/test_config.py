"""Promises of config.py: nothing is traced unless an endpoint is named, and limits are held to."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import load_settings
from kvstore.telemetry.tracing.config import SECTION, TracingSettings


def test_by_default_nothing_is_traced() -> None:
    assert load_settings(TracingSettings, SECTION, flags={}, environ={}).endpoint == ""


def test_variables_name_the_collector_and_the_share() -> None:
    environ = {"KVSTORE_TRACING_ENDPOINT": "http://c/v1/traces", "KVSTORE_TRACING_SAMPLE_RATIO": "0.5"}
    settings = load_settings(TracingSettings, SECTION, flags={}, environ=environ)
    assert (settings.endpoint, settings.sample_ratio) == ("http://c/v1/traces", 0.5)


@pytest.mark.parametrize(("name", "value"), [("sample_ratio", "1.1"), ("sample_ratio", "-1"), ("queue_spans", "0"), ("timeout_s", "0")])
def test_what_is_out_of_bounds_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"KVSTORE_TRACING_{name.upper()}"):
        load_settings(TracingSettings, SECTION, flags={}, environ={f"KVSTORE_TRACING_{name.upper()}": value})
