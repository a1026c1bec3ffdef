"""Settings of the LMCache plug-ins: `adapter_params` of an L2 adapter, `extra_config` of a remote connector, `KVSTORE_LMCACHE_*`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.engines.settings import StoreSettings, settings_from
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import setting

SECTION: Final = "lmcache"
PLUG_IN_ENTRIES: Final = frozenset({"module_path", "class_name"})
"""Of a remote storage plug-in: LMCache's own."""


@dataclass(frozen=True, slots=True)
class LMCacheSettings(StoreSettings):
    """Of an L2 adapter and of a remote connector."""

    dtype: str = setting(
        "",
        "Element type or quantisation of the cache, in the name of its chunks. An L2 adapter needs it, for LMCache's keys of objects hold "
        "none: servers of one model that differ in it would read each other's chunks. A remote connector's chunks have LMCache's.",
    )
    chunk_tokens: int = setting(256, "Tokens in a chunk, as LMCache's --chunk-size.", minimum=1, maximum=65_536)


def from_parameters(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> LMCacheSettings:
    """What an L2 adapter's `adapter_params` say. Raises ConfigError."""
    settings = settings_from(LMCacheSettings, SECTION, given, source="adapter_params", environ=environ)
    if not settings.dtype:
        raise ConfigError(
            'adapter_params name no dtype: give that of the engines\' cache, as "dtype": "bfloat16"; LMCache does not tell it'
        )
    return settings


def from_extra_config(extra: Mapping[str, Any], name: str, environ: Mapping[str, str] | None = None) -> LMCacheSettings:
    """What the entries `remote_storage_plugin.NAME.*` of LMCache's `extra_config` say. Raises ConfigError."""
    prefix = f"remote_storage_plugin.{name}."
    given = {entry.removeprefix(prefix): value for entry, value in extra.items() if entry.startswith(prefix)}
    return settings_from(LMCacheSettings, SECTION, given, source=f"extra_config, {prefix}*", engine_names=PLUG_IN_ENTRIES, environ=environ)
