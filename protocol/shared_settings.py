"""Settings that several programs have, each declared once: `http: str = shared_settings.HTTP()`.

A program can override the default: `BLOCK_TOKENS(default=16)`. TLS settings are in `security/tls/config.py`, those of
engine plug-ins in `engines/settings.py`; programs inherit them. `variables.SHARED` lists all names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvstore.protocol.settings import setting

LEVELS: Final = ("debug", "info", "warning", "error")
"""Log levels, the least severe first."""
FORMATS: Final = ("text", "json")
"""Formats of log lines."""


def _shared(default: Any, help: str, **bounds: Any) -> Callable[..., Any]:
    """Return `setting` with these arguments, of which a caller may override `default`."""
    return partial(setting, default=default, help=help, shared=True, **bounds)


MASTER: Final = _shared("127.0.0.1:7440", "Addresses of the masters, HOST:PORT or unix:PATH, comma separated.")
TENANT: Final = _shared("", "The tenant whose blocks the program reads and writes.")
TOKEN: Final = _shared("", "The tenant's token. The commands of `kvstore` also take an operator's.")
INSTANCE_TOKEN: Final = _shared(
    "", "Token of the section [instances] with which an engine reports to the scheduler; default: the tenant's."
)
ALLOW_UNAUTHENTICATED: Final = _shared(
    False,
    "Listen on non-loopback addresses without authentication (docs/security.md): every host that reaches the address can read and "
    "write everything.",
)
RUN_DIR: Final = _shared(
    "", "Folder of the Unix socket for processes of this host; default: $XDG_RUNTIME_DIR/kvstore, or a private one in /tmp."
)
SOCKET_GROUP: Final = _shared(
    "",
    "Group, by name or number, whose members may connect to the Unix socket as other users of this host (docs/sharing.md); its "
    "folder is made enterable for them. Default: only the user that runs this.",
)
SOCKET_MODE: Final = _shared(
    "", "Permission bits of the Unix socket, octal; default: 0660 with a socket_group, else 0600. 0666 admits every user of the host."
)
BUSY_POLL_US: Final = _shared(
    100,
    "Longest time that a thread polls for the next message before it sleeps, while recent messages arrived that soon; 0: never. Not "
    "on a single processor, and not in `AsyncClient`.",
    minimum=0,
    maximum=10_000,
)
HTTP: Final = _shared(
    "127.0.0.1:0",
    "HOST:PORT of health, metrics and diagnostics (HTTP, docs/operations.md); port 0 takes a free one, shown by "
    "`kvstore status --json`; empty: none.",
)
HTTP_TOKEN_FILE: Final = _shared(
    "",
    "File with tokens, one a line, reloaded when it changes: the HTTP port serves requests of any host with one of them "
    "(Authorization: Bearer TOKEN) and no others; without it, only this host. Health is served to all.",
)
HTTP_TLS_CERT: Final = _shared(
    "",
    "PEM file of the HTTP port's certificate chain: with it the port serves HTTPS only. Requires http_tls_key; reloaded when it changes.",
)
HTTP_TLS_KEY: Final = _shared("", "PEM file of that certificate's private key, readable by its owner only.")
LOG_LEVEL: Final = _shared(
    "info",
    f"Lowest level that is logged: {', '.join(LEVELS)}; a POST to /debug/log-level changes it at run time.",
    choices=LEVELS,
)
LOG_FORMAT: Final = _shared(
    "text",
    "Format of log lines: text, or json, an object a line; both have the event names and fields of docs/operations.md.",
    choices=FORMATS,
)
MODEL: Final = _shared(
    "",
    "Name of the model, part of its blocks' namespace. Router: required. Sidecar: required if it reads the engine's events, unless "
    "namespace_id is given. Publisher: the name that routers query. SGLang: default: the name or path given to it. vLLM: default: "
    "the model's architecture, or the name or path given to it if there is no fingerprint.",
)
DTYPE: Final = _shared("bfloat16", "Element type of the cache, part of the namespace. Not used with namespace_id.")
BLOCK_TOKENS: Final = _shared(
    512,
    "Tokens in a block, equal to the engines'. In programs that read vLLM's events the default is vLLM's.",
    minimum=1,
    maximum=65_536,
)
NAMESPACE_ID: Final = _shared(
    "",
    "Id of the blocks' namespace, in hex, as vLLM's connector logs it; in the router only with naming vllm. Default: the namespace "
    "is derived from model and dtype.",
)
SHARE_TP: Final = _shared(
    0,
    "Number of values into which the KV heads of a block or page are split, so that engines of different tensor parallelism share it: "
    "a divisor of the model's KV heads and a multiple of each engine's TP, equal in all engines. 0: SGLang's `tp_lcm_size`, if set; "
    "else one value a rank, shared by engines of equal TP.",
    minimum=0,
    maximum=1024,
)
RETENTION_FROM_REQUESTS: Final = _shared(
    False,
    "Take retention hints (priority, session, expected reuse) from requests of clients. Off: they are ignored. Hints of a program that "
    "calls the library are always taken.",
)
RETENTION_CEILING: Final = _shared(
    75, "Highest priority that a request can give to its blocks; higher ones are lowered.", minimum=0, maximum=100
)
LOOKUP_DEADLINE_S: Final = _shared(
    0.5,
    "Deadline of a lookup, which then is a miss. Shorter in vLLM, whose scheduler blocks meanwhile.",
    minimum=0.001,
    maximum=60,
)
