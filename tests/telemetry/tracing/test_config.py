"""Promises of config.py: nothing is traced unless an endpoint is named, and limits are held to."""

import subprocess
import sys

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import load_settings
from kvstore.telemetry.tracing.config import SECTION, TracingSettings, open_tracing, span_counts

ENDPOINT = "http://127.0.0.1:9/v1/traces"
LOADED = """
import sys
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.telemetry.tracing.config import open_tracing
assert open_tracing(TracingSettings(), role="node", instance="n") is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_by_default_nothing_is_traced() -> None:
    assert load_settings(TracingSettings, SECTION, flags={}, environ={}).endpoint == ""


def test_variables_name_the_collector_and_the_share() -> None:
    environ = {"KVSTORE_TRACING_ENDPOINT": "http://c/v1/traces", "KVSTORE_TRACING_SAMPLE_RATIO": "0.5"}
    settings = load_settings(TracingSettings, SECTION, flags={}, environ=environ)
    assert (settings.endpoint, settings.sample_ratio) == ("http://c/v1/traces", 0.5)


@pytest.mark.parametrize(("name", "value"), [("sample_ratio", "1.1"), ("sample_ratio", "-1")])
def test_what_is_out_of_bounds_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"KVSTORE_TRACING_{name.upper()}"):
        load_settings(TracingSettings, SECTION, flags={}, environ={f"KVSTORE_TRACING_{name.upper()}": value})


def test_tracing_without_endpoint_loads_nothing() -> None:
    assert open_tracing(None, role="node", instance="n") is None
    assert open_tracing(TracingSettings(), role="node", instance="n") is None
    assert span_counts(None) == {}
    done = subprocess.run([sys.executable, "-c", LOADED], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http:///v1/traces"])
def test_what_is_no_url_of_http_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="such as http://"):
        open_tracing(TracingSettings(endpoint=endpoint), role="node", instance="n")


def test_without_opentelemetry_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstore.telemetry.tracing.spans", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[tracing\]'"):
        open_tracing(TracingSettings(endpoint=ENDPOINT), role="node", instance="n")


def test_spans_are_told_by_what_came_of_them() -> None:
    tracing = open_tracing(TracingSettings(endpoint=ENDPOINT), role="node", instance="n")
    assert tracing is not None
    assert span_counts(tracing) == {("exported",): 0, ("failed",): 0, ("dropped",): 0}
    tracing.close()
