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
MASTER: Final = f"{PREFIX}MASTER"
"""The masters, for every program that is not told of them otherwise."""
SECTIONS: Final = frozenset(
    ("client", "handover", "jobs", "lmcache", "master", "mooncake", "node", "publisher", "router")
    + ("sglang", "sidecar", "standin", "tensors", "tracing", "transfer", "vllm")
)
"""Whose settings there are: a program leaves alone what begins as another's do."""
CLOSE: Final = 0.75
"""How like a setting's name a name has to be to be taken for it, as difflib measures it."""
SERVICE_LINK: Final = re.compile(r"\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""What Kubernetes puts into every container for a Service called, say, kvstore-master."""


def variable_name(section: str, name: str) -> str:
    """Of a setting of a program."""
    return f"{PREFIX}{section}_{name}".upper()


def check_variables(environ: Mapping[str, str], section: str, names: Collection[str]) -> None:
    """Raises ConfigError for a variable that looks like a setting of the program whose section and settings these are, and is none."""
    own = {variable_name(section, name) for name in names}
    known = own | {CONFIG, MASTER}
    others = tuple(variable_name(other, "") for other in SECTIONS - {section})
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known or variable.startswith(others) or SERVICE_LINK.fullmatch(variable):
            continue
        if meant := nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known]):  # all begin with it
            raise ConfigError(f"{variable} is no setting: did you mean {PREFIX}{meant}?")
        if variable.startswith(variable_name(section, "")):
            raise ConfigError(f"{variable} is no setting: those of {section} are in docs/settings.md, and --help lists them")


def nearest(name: str, known: Collection[str]) -> str:
    """The known name that is most like this one; "" if none is."""
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=CLOSE)), "")
