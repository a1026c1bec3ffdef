"""Names of environment variables: what a setting's is, and which ones look like a setting that somebody misspelt.

What is misspelt would otherwise do nothing, and nobody would know. A variable that begins as the program's own do is held to the program's
settings; of others only what comes close to one of them is refused, for an environment has more users than one.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final

from kvstore.protocol.errors import ConfigError

PREFIX: Final = "KVSTORE_"
CONFIG: Final = f"{PREFIX}CONFIG"
"""Names the TOML file of every program."""
SHARED: Final = frozenset(
    ("allow_unauthenticated", "block_tokens", "busy_poll_us", "dtype", "fingerprint", "http", "http_tls_cert", "http_tls_key")
    + ("http_token_file", "instance_token", "load_deadline_s", "log_format", "log_level", "lookup_deadline_s", "master", "model")
    + ("namespace_id", "revision", "run_dir", "salt", "share_tp", "socket_group", "socket_mode", "tenant", "tls_ca", "tls_cert")
    + ("tls_key", "tls_require_client_cert", "tls_revoked", "token")
)
"""Settings that several programs have. KVSTORE_TLS_CA, or [shared] tls_ca, is for all of these that are not given their own."""
SHARED_SECTION: Final = "shared"
SECTIONS: Final = frozenset(
    ("client", "handover", "lmcache", "master", "mooncake", "node", "publisher", "router")
    + ("sglang", "sidecar", "fake_engine", "tracing", "transfer", "vllm")
)
"""Whose settings there are: a program leaves alone what begins as another's do."""
CLOSE: Final = 0.75
"""How like a setting's name a name has to be to be taken for it, as difflib measures it."""
SERVICE_LINK: Final = re.compile(r"\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""What Kubernetes puts into every container for a Service called, say, kvstore-master."""


def variable_name(section: str, name: str) -> str:
    """Of a setting of a program."""
    return f"{PREFIX}{section}_{name}".upper()


def shared_variable_name(name: str) -> str:
    """Of a setting for every program that has it."""
    return f"{PREFIX}{name}".upper()


def check_variables(environ: Mapping[str, str], section: str, names: Collection[str]) -> None:
    """Raises ConfigError for a variable that looks like a setting of the program whose section and settings these are, and is none."""
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
    """The known name that is most like this one; "" if none is."""
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=CLOSE)), "")
