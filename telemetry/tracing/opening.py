"""From settings to traces: nothing of OpenTelemetry is loaded where they are not wanted."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line
from kvstore.telemetry.metrics.metric import Reading
from kvstore.telemetry.tracing.config import TracingSettings

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing


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


def spans_told(tracing: "Tracing | None") -> Reading:
    """For the metrics: spans by what came of them; nothing where nothing is traced."""
    return {(outcome,): count for outcome, count in tracing.queue.counts().items()} if tracing is not None else {}
