"""Settings of traces, the same for every program that has them ([tracing] in the TOML file, KVSTORE_TRACING_*), and what opens them.

Nothing of OpenTelemetry is loaded where no endpoint is named.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line
from kvstore.protocol.settings import constant, setting
from kvstore.telemetry.metrics.metric import Reading

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing

SECTION: Final = "tracing"


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Where spans go, and how many there are at most. See docs/tracing.md."""

    endpoint: str = setting(
        "",
        "URL where a collector of OpenTelemetry traces takes OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; empty: nothing "
        "is traced.",
    )
    sample_ratio: float = setting(
        0.01,
        "Share of a client's calls that are traced. A call within a span of the program's own is traced where that one is, and else not. "
        "Likewise of a router's requests, unless their header `traceparent` says whether they are, and of a sidecar's reports. "
        "Masters and nodes trace what is asked for these, and nothing besides.",
        minimum=0,
        maximum=1,
    )
    flush_interval_s: float = constant(1.0)
    """Longest time that a span waits before it is sent: a trace is complete a second after its call."""


def open_tracing(settings: TracingSettings | None, *, role: str, instance: str) -> "Tracing | None":
    """None where no endpoint is named. Raises ConfigError: it is no URL of HTTP, or the extra `tracing` is not installed."""
    if settings is None or not settings.endpoint:
        return None
    url = urlsplit(settings.endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(f"[tracing] endpoint is {settings.endpoint!r}: write a URL, such as http://127.0.0.1:4318/v1/traces")
    try:
        from kvstore.telemetry.tracing.spans import Tracing
    except ImportError as error:
        raise ConfigError(f"traces need OpenTelemetry ({error}): {install_line('tracing')}") from None
    return Tracing(settings, role=role, instance=instance)


def span_counts(tracing: "Tracing | None") -> Reading:
    """For the metrics: spans by what came of them; nothing where nothing is traced."""
    return {(outcome,): count for outcome, count in tracing.queue.counts().items()} if tracing is not None else {}
