"""What the daemons of this host are told by the settings file and by variables, as far as the doctor looks at it.

Texts as they stand there: what they mean is checked by the daemons, whose packages a client does not import.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvstore.protocol.variables import CONFIG, variable_name

DAEMONS: Final = ("master", "node", "router", "sidecar", "publisher")
CERTIFICATES: Final = ("tls_cert", "http_tls_cert")


def told(section: str, name: str, config: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """A daemon's setting, "" where nobody says: by its variable, else by `config` or the file that KVSTORE_CONFIG names, which has been
    read as the client's settings by then."""
    variable = variable_name(section, name)
    if variable in environ:
        return environ[variable]
    file = config or environ.get(CONFIG, "")
    table = tomllib.loads(Path(file).read_text(encoding="utf-8")).get(section, {}) if file else {}
    return str(table.get(name, "")) if isinstance(table, dict) else ""


def certificates(config: str | None = None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The certificates that daemons show, by the first setting that names each: "[node] http_tls_cert"."""
    found: dict[str, str] = {}
    for section in DAEMONS:
        for name in CERTIFICATES:
            file = told(section, name, config, environ)
            if file and file not in found.values():
                found[f"[{section}] {name}"] = file
    return found
