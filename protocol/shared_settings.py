"""Settings that several programs have, each declared once: `http: str = shared_settings.HTTP()`.

A program whose default differs gives it: `BLOCK_TOKENS(default=16)`. The settings of TLS are in `security/tls/config.py` and those of
engines' plug-ins in `engines/settings.py`, which programs inherit. `variables.SHARED` has the names of all.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvstore.protocol.settings import setting

LEVELS: Final = ("debug", "info", "warning", "error")
"""Of log lines, the least severe first."""
FORMATS: Final = ("text", "json")
"""Of log lines."""


def _shared(default: Any, help: str, **bounds: Any) -> Callable[..., Any]:
    """Return `setting` with these arguments; its own `default` is stronger."""
    return partial(setting, default=default, help=help, shared=True, **bounds)


MASTER: Final = _shared("127.0.0.1:7440", "Addresses of the masters, HOST:PORT or unix:PATH, comma separated.")
TENANT: Final = _shared("", "The tenant whose blocks the program reads and writes.")
TOKEN: Final = _shared("", "The tenant's token. The commands of `kvstore` also take an operator's.")
INSTANCE_TOKEN: Final = _shared("", "Token of the section [instances], by which an engine reports to the scheduler; default: the tenant's.")
ALLOW_UNAUTHENTICATED: Final = _shared(
    False,
    "Listen also where other hosts reach this, though no authentication is configured (docs/security.md): every host that reaches "
    "the address reads and writes everything.",
)
RUN_DIR: Final = _shared(
    "", "Folder of the Unix socket for processes of this host; default: $XDG_RUNTIME_DIR/kvstore, or a private one in /tmp."
)
SOCKET_GROUP: Final = _shared(
    "",
    "Group, by name or number, whose members may connect to the Unix socket as other users of this host (docs/sharing.md); its "
    "folder is opened for them to enter. None by default: only the user that runs this.",
)
SOCKET_MODE: Final = _shared(
    "", "Permission bits of the Unix socket, octal; default: 0660 with a socket_group, else 0600. 0666 lets in every user of the host."
)
BUSY_POLL_US: Final = _shared(
    100,
    "Longest time that a thread polls for the next message before it sleeps, where messages have come as soon as that; 0: it sleeps "
    "at once. Not where this process has one processor only, and not `AsyncClient`.",
    minimum=0,
    maximum=10_000,
)
HTTP: Final = _shared(
    "127.0.0.1:0",
    "HOST:PORT of health, metrics and diagnostics (HTTP, docs/operations.md); port 0 takes a free one, which "
    "`kvstore status --json` names; empty: none.",
)
HTTP_TOKEN_FILE: Final = _shared(
    "",
    "File with tokens, one a line, read again when it changes: the HTTP port serves every host that sends one of them "
    "(Authorization: Bearer TOKEN), and no other request; without it, this host. Health is served to all.",
)
HTTP_TLS_CERT: Final = _shared(
    "",
    "PEM file of the HTTP port's certificate, and of those between it and its authority: with it the port speaks HTTPS only. Goes "
    "with http_tls_key; read again as those of TLS are.",
)
HTTP_TLS_KEY: Final = _shared("", "PEM file of that certificate's private key, for its owner's eyes only.")
LOG_LEVEL: Final = _shared(
    "info",
    f"Lowest level of the lines that are logged; at run time a POST to /debug/log-level changes it: {', '.join(LEVELS)}.",
    choices=LEVELS,
)
LOG_FORMAT: Final = _shared(
    "text",
    "Form of log lines: text, or json, an object a line; events have the names and fields of docs/operations.md in both.",
    choices=FORMATS,
)
MODEL: Final = _shared(
    "",
    "Name of the model, in the names of its blocks. Router: needed. Sidecar: needed where it reads the engine's events, unless "
    "namespace_id is given. Publisher: the name under which routers ask for it. SGLang: empty is the name or path that it was given. "
    "vLLM: empty is the model's architecture, and the name or path that it was given where there is no fingerprint.",
)
DTYPE: Final = _shared("bfloat16", "Element type of the cache, in the names of blocks. Not used with namespace_id.")
BLOCK_TOKENS: Final = _shared(
    512,
    "Tokens in a block, as the engines have it. Where the program goes by vLLM's events, the default is vLLM's.",
    minimum=1,
    maximum=65_536,
)
NAMESPACE_ID: Final = _shared(
    "",
    "Id of the blocks' namespace, in hex, as vLLM's connector logs it; the router's goes with its naming vllm. Default: blocks are "
    "named by model and dtype.",
)
SHARE_TP: Final = _shared(
    0,
    "Values in which the KV heads of a block or page are stored, so that engines of any tensor parallelism share it: a divisor of "
    "the model's KV heads and a multiple of each engine's TP, equal in all these engines. 0: SGLang's `tp_lcm_size`, where that is set; "
    "else one value a rank, shared by engines of equal TP.",
    minimum=0,
    maximum=1024,
)
LOOKUP_DEADLINE_S: Final = _shared(
    0.5,
    "Time for a lookup; then it is a miss. vLLM's is shorter: its scheduler waits meanwhile.",
    minimum=0.001,
    maximum=60,
)
