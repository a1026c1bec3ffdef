"""The HTTP port of a daemon as its settings say: where, and who is let in from other hosts."""

from typing import Final, Protocol

from kvstore.security.tls.https import HttpsCertificate
from kvstore.telemetry.http.access import this_host_only
from kvstore.telemetry.http.by_token import by_file, why_unknown
from kvstore.telemetry.http.server import HttpServer

HTTP_DEFAULT: Final = "127.0.0.1:0"
HTTP_HELP: Final = (
    "HOST:PORT of health, metrics and diagnostics (HTTP, docs/operations.md); port 0 takes a free one, which "
    "`kvstore status --json` names; empty: none."
)
HTTP_TOKEN_FILE_HELP: Final = (
    "File with tokens, one a line, read again when it changes: who shows one on the HTTP port (Authorization: Bearer TOKEN) is let in, "
    "from other hosts too, and nobody else; without it this host is. Health is told to all."
)


class HttpSettings(Protocol):
    """Of a daemon: those of its HTTP port."""

    @property
    def http(self) -> str: ...
    @property
    def http_token_file(self) -> str: ...
    @property
    def http_tls_cert(self) -> str: ...
    @property
    def http_tls_key(self) -> str: ...


def open_http(settings: HttpSettings) -> HttpServer | None:
    """The server of a daemon with these settings; None where they want none. Raises ConfigError, InvalidArgument."""
    authorize = by_file(settings.http_token_file) if settings.http_token_file else this_host_only
    https = HttpsCertificate.of(settings.http_tls_cert, settings.http_tls_key)
    return HttpServer(settings.http, authorize=authorize, explain=why_unknown, https=https) if settings.http else None
