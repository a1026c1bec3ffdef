"""The HTTP port of a daemon as its settings say: where, and who is let in from other hosts."""

from typing import Final

from kvstore.telemetry.http.access import this_host_only
from kvstore.telemetry.http.by_token import by_file
from kvstore.telemetry.http.server import HttpServer

HTTP_DEFAULT: Final = "127.0.0.1:0"
HTTP_HELP: Final = (
    "HOST:PORT of health, metrics and diagnostics (HTTP, docs/operations.md); port 0 takes a free one, which "
    "`kvstore status --json` names; empty: none."
)
HTTP_TOKEN_FILE_HELP: Final = (
    "File with tokens, one a line, read at the start: who shows one on the HTTP port (Authorization: Bearer TOKEN) is let in, from other "
    "hosts too, and nobody else; without it this host is. Health is told to all."
)


def open_http(listen: str, token_file: str) -> HttpServer | None:
    """The server of a daemon with these settings `http` and `http_token_file`; None for no `http`. Raises ConfigError, InvalidArgument."""
    authorize = by_file(token_file) if token_file else this_host_only
    return HttpServer(listen, authorize=authorize) if listen else None
