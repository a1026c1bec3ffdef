"""The command `check`: whether daemons would accept a tokens, quotas or settings file, read by the code of the daemons.

Exit status 1: a file would be refused.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Final

import click

from kvstore.cli.options import echo_json, json_option
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import load_settings
from kvstore.protocol.variables import SECTIONS, SHARED_SECTION
from kvstore.security.config_file import read_toml
from kvstore.security.credentials import SECTIONS as TOKEN_SECTIONS
from kvstore.security.credentials import read_credentials
from kvstore.security.identity import IdentityKind
from kvstore.security.quotas.limits import read_tables
from kvstore.security.quotas.quota import NAMES

MAX_FILE_BYTES: Final = 4 << 20
SETTINGS: Final = {
    "client": "client.config:ClientSettings",
    "handover": "handover.config:HandoverSettings",
    "lmcache": "engines.lmcache.settings:LMCacheSettings",
    "master": "master.config:MasterSettings",
    "mooncake": "engines.mooncake.setup:MooncakeSettings",
    "node": "store.config:NodeSettings",
    "publisher": "engines.publisher.config:PublisherSettings",
    "router": "router.config:RouterSettings",
    "sglang": "engines.sglang.settings:SGLangSettings",
    "sidecar": "engines.sidecar.config:SidecarSettings",
    "standin": "router.fake_engine.config:FakeEngineSettings",
    "tracing": "telemetry.tracing.config:TracingSettings",
    "transfer": "transfer.config:TransferSettings",
    "vllm": "engines.vllm.settings:VllmSettings",
}
"""Section of the settings file -> module and class of its settings. Names, because a client imports no daemon."""

WRONG_STATUS: Final = 1


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """Result for one file: its kind ("" if unknown), and what it holds or why it would be refused."""

    file: str
    kind: str
    is_valid: bool
    found: str


def check_file(file: str, kind: str | None = None) -> CheckedFile:
    """Read the file as one of `kind`, or as what its sections say."""
    try:
        kind = kind or kind_of(file, read_toml(file, "the file", max_bytes=MAX_FILE_BYTES))
        return CheckedFile(file, kind, True, _CHECKS[kind](file))
    except ConfigError as error:
        return CheckedFile(file, kind or "", False, str(error))


def kind_of(file: str, table: Mapping[str, Any]) -> str:
    """The kind of a file with these sections. Raises ConfigError."""
    names = set(table)
    tenants = table.get("tenants", {})
    entries = list(tenants.values()) if isinstance(tenants, dict) else []
    if "default" in names or any(isinstance(entry, dict) and set(entry) & set(NAMES) for entry in entries):
        return "quotas"
    if names & set(TOKEN_SECTIONS):
        return "tokens"
    if names & SECTIONS:
        return "settings"
    raise ConfigError(
        f"{file} is no file of kvstore: tokens have [tenants] and [nodes], quotas [default] and [tenants.NAME], "
        "settings [master], [node], [client] and the like"
    )


def settings_kind(section: str) -> type[Any]:
    """Import the class of the settings of a section."""
    module, _, name = SETTINGS[section].partition(":")
    kind: type[Any] = getattr(import_module(f"kvstore.{module}"), name)
    return kind


def _tokens(file: str) -> str:
    credentials = read_credentials(file, nodes_have_certificates=True)
    joins = "" if credentials.has(IdentityKind.NODE) else "; none lets a node join, so nodes need certificates"
    return f"{len(credentials):,} token{'s' * (len(credentials) != 1)}{joins}"


def _quotas(file: str) -> str:
    tables = read_tables(file)
    return f"{len(tables.tenants):,} tenant{'s' * (len(tables.tenants) != 1)} and {'a' if tables.default else 'no'} default"


def _settings(file: str) -> str:
    sections = sorted(set(read_toml(file, "the settings file", max_bytes=MAX_FILE_BYTES)))
    readers = SETTINGS if SHARED_SECTION in sections else [name for name in sections if name in SETTINGS]
    for section in readers or ["client"]:  # any program names unknown sections
        load_settings(settings_kind(section), section, flags={}, environ={}, config=file)
    return ", ".join(f"[{section}]" for section in sections)


_CHECKS: Final[dict[str, Callable[[str], str]]] = {"tokens": _tokens, "quotas": _quotas, "settings": _settings}
KINDS: Final = tuple(_CHECKS)


@click.command(short_help="Check a tokens, quotas or settings file.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--kind", type=click.Choice(KINDS), help="What the files are.  [default: by their sections]")
@json_option
def check(files: tuple[str, ...], kind: str | None, as_json: bool) -> None:
    """Read each FILE as the daemons do, and print what it is, or the entry that is wrong.

    Exit status 1 if a file would be refused. Nothing is asked of a cluster.
    """
    found = [check_file(file, kind) for file in files]
    if as_json:
        echo_json([asdict(one) for one in found])
    else:
        for one in found:
            click.echo(f"{one.file}: {one.kind or 'unknown'}, {one.found}" if one.is_valid else f"{one.file}: refused: {one.found}")
    if not all(one.is_valid for one in found):
        sys.exit(WRONG_STATUS)
