"""Names of environment variables of settings, and detection of misspelt ones.

A misspelt variable would silently have no effect. One with the program's own prefix must be a setting of the program.
Other KVSTORE_ variables are refused only if they resemble a setting, because other programs share the environment.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final

from kvstore.protocol.errors import ConfigError

PREFIX: Final = "KVSTORE_"
CONFIG: Final = f"{PREFIX}CONFIG"
"""Variable with the path of the TOML file, for every program."""
SHARED: Final = frozenset(
    ("allow_unauthenticated", "block_tokens", "busy_poll_us", "dtype", "fingerprint", "http", "http_tls_cert", "http_tls_key")
    + ("http_token_file", "instance_token", "load_deadline_s", "log_format", "log_level", "lookup_deadline_s", "master", "model")
    + ("namespace_id", "retention_ceiling", "retention_from_requests", "revision", "run_dir", "salt", "share_tp", "socket_group")
    + ("socket_mode", "tenant", "tls_ca", "tls_cert", "tls_key", "tls_require_client_cert", "tls_revoked", "token")
)
"""Settings that several programs have. KVSTORE_TLS_CA, or [shared] tls_ca, applies to every program without its own
value."""
SHARED_SECTION: Final = "shared"
SECTIONS: Final = frozenset(
    ("client", "handover", "lmcache", "master", "mooncake", "node", "publisher", "router")
    + ("sglang", "sidecar", "fake_engine", "tracing", "transfer", "vllm")
)
"""Sections of programs with settings. A program ignores variables with another section's prefix."""
CLOSE: Final = 0.75
"""Similarity (difflib) from which on a name counts as a misspelt setting."""
SERVICE_LINK: Final = re.compile(r"\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""Variables that Kubernetes sets in every container for a Service named, say, kvstore-master."""


def variable_name(section: str, name: str) -> str:
    """Return the variable of one program's setting."""
    return f"{PREFIX}{section}_{name}".upper()


def shared_variable_name(name: str) -> str:
    """Return the variable of a setting for all programs that have it."""
    return f"{PREFIX}{name}".upper()


def check_variables(environ: Mapping[str, str], section: str, names: Collection[str]) -> None:
    """Raises ConfigError for a variable that resembles a setting and is none.

    `section`, `names`: the program's settings.
    """
    own = {variable_name(section, name) for name in names}
    known = own | {CONFIG} | {shared_variable_name(name) for name in SHARED}
    others = tuple(variable_name(other, "") for other in SECTIONS - {section})
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known or variable.startswith(others) or SERVICE_LINK.fullmatch(variable):
            continue
        if meant := nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known]):  # all begin with it
            raise ConfigError(f"{variable} is no setting: did you mean {PREFIX}{meant}?")
        if variable.startswith(variable_name(section, "")):
            raise ConfigError(f"{variable} is no setting: those of {section} are in docs/settings.md, and --help lists them")
        if variable.startswith(variable_name(SHARED_SECTION, "")):
            raise ConfigError(f"{variable} is no setting: the variable of a shared setting is {PREFIX}NAME, as {PREFIX}TLS_CA")


def nearest(name: str, known: Collection[str]) -> str:
    """Return the most similar known name; "" if none is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=CLOSE)), "")
