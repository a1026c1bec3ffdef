"""HEALTHCHECK of the image: exits with 0 if the daemon responds on /healthz or has no HTTP port, else with 1.

The command line of the container's first process identifies the daemon. Its address is the setting `http`, from a flag, the environment or
the settings file. Nothing of kvstore is imported, because the check runs every 10 seconds.
"""

import itertools
import os
import ssl
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any, Final

DAEMONS: Final = ("master", "node", "router", "sidecar", "publisher")
TIMEOUT_S: Final = 5.0


def main(pid: int) -> int:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    names = [name for word in words for name in DAEMONS if Path(word).name == f"kvstore-{name}"]
    address = setting(names[0], "http", words) if names else ""
    host, _colon, port = address.rpartition(":")
    if port in ("", "0"):
        return 0
    scheme = "https" if setting(names[0], "http_tls_cert", words) else "http"
    at = "127.0.0.1" if host in ("", "0.0.0.0") else "[::1]" if host == "[::]" else host
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the same container, and no secrets
    try:
        with urllib.request.urlopen(f"{scheme}://{at}:{port}/healthz", timeout=TIMEOUT_S, context=context) as answer:
            return int(answer.status != 200)
    except OSError as error:
        sys.stdout.write(f"{scheme}://{at}:{port}/healthz: {error}\n")
        return 1


def setting(daemon: str, name: str, words: list[str]) -> str:
    """Return a setting of the daemon; "" for its default."""
    given = flag_value(f"--{name.replace('_', '-')}", words)
    if given is not None:
        return given
    for variable in (f"KVSTORE_{daemon}_{name}".upper(), f"KVSTORE_{name}".upper()):
        if variable in os.environ:
            return os.environ[variable]
    tables = settings_file(words)
    return str({**tables.get("shared", {}), **tables.get(daemon, {})}.get(name, ""))


def flag_value(flag: str, words: list[str]) -> str | None:
    """Return the value of `FLAG VALUE` or `FLAG=VALUE`; None if it is not given."""
    for word, following in itertools.pairwise([*words, ""]):
        if word == flag or word.startswith(f"{flag}="):
            return following if word == flag else word.partition("=")[2]
    return None


def settings_file(words: list[str]) -> dict[str, Any]:
    """Return the sections of the file of --config or KVSTORE_CONFIG; empty if there is none or it cannot be read."""
    path = flag_value("--config", words) or os.environ.get("KVSTORE_CONFIG")
    try:
        return tomllib.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
