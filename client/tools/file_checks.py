"""Checks of the files that operators write: tokens, quotas and settings, read by the code of the daemons."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import load_settings
from kvstore.protocol.variables import SECTIONS
from kvstore.security.config_file import read_toml
from kvstore.security.credentials import SECTIONS as TOKEN_SECTIONS
from kvstore.security.credentials import read_credentials
from kvstore.security.identity import Kind
from kvstore.security.quotas.limits import read_tables
from kvstore.security.quotas.quota import NAMES

MAX_FILE_BYTES: Final = 4 << 20
SETTINGS: Final = {
    "client": "client.config:ClientSettings",
    "handover": "handover.config:HandoverSettings",
    "jobs": "client.jobs.config:JobSettings",
    "lmcache": "engines.lmcache.settings:LMCacheSettings",
    "master": "master.config:MasterSettings",
    "mooncake": "engines.mooncake.settings:MooncakeSettings",
    "node": "store.config:NodeSettings",
    "publisher": "engines.publisher.config:PublisherSettings",
    "router": "router.config:RouterSettings",
    "sglang": "engines.sglang.settings:SGLangSettings",
    "sidecar": "engines.sidecar.config:SidecarSettings",
    "standin": "router.standin.config:StandinSettings",
    "tensors": "client.tensors.config:TensorSettings",
    "tracing": "telemetry.tracing.config:TracingSettings",
    "transfer": "transfer.config:TransferSettings",
    "vllm": "engines.vllm.settings:VllmSettings",
}
"""Section of the settings file -> module and class of its settings. Names, because a client imports no daemon."""


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


def _tokens(file: str) -> str:
    credentials = read_credentials(file, nodes_have_certificates=True)
    joins = "" if credentials.has(Kind.NODE) else "; none lets a node join, so nodes need certificates"
    return f"{len(credentials):,} token{'s' * (len(credentials) != 1)}{joins}"


def _quotas(file: str) -> str:
    tables = read_tables(file)
    return f"{len(tables.tenants):,} tenant{'s' * (len(tables.tenants) != 1)} and {'a' if tables.default else 'no'} default"


def _settings(file: str) -> str:
    sections = sorted(set(read_toml(file, "the settings file", max_bytes=MAX_FILE_BYTES)))
    for section in [name for name in sections if name in SETTINGS] or ["client"]:  # any program names unknown sections
        module, _, name = SETTINGS[section].partition(":")
        load_settings(getattr(import_module(f"kvstore.{module}"), name), section, flags={}, environ={}, config=file)
    return ", ".join(f"[{section}]" for section in sections)


_CHECKS: Final[dict[str, Callable[[str], str]]] = {"tokens": _tokens, "quotas": _quotas, "settings": _settings}
KINDS: Final = tuple(_CHECKS)
