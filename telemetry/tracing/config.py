"""Settings of tracing, shared by all programs ([tracing] in the TOML file, KVSTORE_TRACING_*).

OpenTelemetry is imported only if an endpoint is configured.
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
    """Endpoint and sampling of spans. See docs/tracing.md."""

    endpoint: str = setting(
        "",
        "URL of an OpenTelemetry collector for traces by OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; empty: no traces.",
    )
    sample_ratio: float = setting(
        0.01,
        "Share of a client's calls that are traced. A call within a span of the program is traced if that span is sampled. "
        "The same share applies to a router's requests without a `traceparent` header, and to a sidecar's reports. "
        "Masters and nodes trace only requests of traced calls.",
        minimum=0,
        maximum=1,
    )
    flush_interval_s: float = constant(1.0)
    """Longest wait of a span before it is sent: a trace is complete a second after its call."""


def open_tracing(settings: TracingSettings | None, *, role: str, instance: str) -> "Tracing | None":
    """Open tracing; None without an endpoint. Raises ConfigError for a malformed URL, or without the extra
    `tracing`."""
    if settings is None or not settings.endpoint:
        return None
    url = urlsplit(settings.endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(f"[tracing] endpoint is {settings.endpoint!r}: it must be a URL, such as http://127.0.0.1:4318/v1/traces")
    try:
        from kvstore.telemetry.tracing.spans import Tracing
    except ImportError as error:
        raise ConfigError(f"traces need OpenTelemetry ({error}): {install_line('tracing')}") from None
    return Tracing(settings, role=role, instance=instance)


def span_counts(tracing: "Tracing | None") -> Reading:
    """Spans by outcome, for the metrics; {} without tracing."""
    return {(outcome,): count for outcome, count in tracing.queue.counts().items()} if tracing is not None else {}
