"""The setting `http` of every daemon, in one place."""

from typing import Final

HTTP_DEFAULT: Final = "127.0.0.1:0"
HTTP_HELP: Final = (
    "HOST:PORT of health, metrics and diagnostics (HTTP, docs/operations.md); port 0 takes a free one, which "
    "`kvstore status --json` names; empty: none."
)
