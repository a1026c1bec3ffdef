"""Promises of opening.py: OpenTelemetry is loaded only where it is wanted, and whoever lacks it is told what to do."""

import subprocess
import sys

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.telemetry.tracing.opening import open_tracing, spans_told

ENDPOINT = "http://127.0.0.1:9/v1/traces"
LOADED = """
import sys
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.telemetry.tracing.opening import open_tracing
assert open_tracing(TracingSettings(), role="node", instance="n") is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_without_an_endpoint_there_is_nothing_and_nothing_is_loaded() -> None:
    assert open_tracing(None, role="node", instance="n") is None
    assert open_tracing(TracingSettings(), role="node", instance="n") is None
    assert spans_told(None) == {}
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
    assert spans_told(tracing) == {("exported",): 0, ("failed",): 0, ("dropped",): 0}
    tracing.close()
