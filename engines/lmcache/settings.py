"""Settings of the LMCache plug-ins: `adapter_params` of an L2 adapter, `extra_config` of a remote connector,
`KVSTORE_LMCACHE_*`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.engines.settings import StoreSettings, settings_from
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.settings import setting

SECTION: Final = "lmcache"
PLUG_IN_ENTRIES: Final = frozenset({"module_path", "class_name"})
"""LMCache's own entries of a remote storage plug-in."""


@dataclass(frozen=True, slots=True)
class LMCacheSettings(StoreSettings):
    """Settings of an L2 adapter or a remote connector."""

    dtype: str = setting(
        "",
        "Element type or quantisation of the cache, part of a chunk's key. An L2 adapter needs it, because LMCache's object keys lack "
        "it: servers of one model with different types would read each other's chunks. A remote connector takes it from LMCache.",
    )
    chunk_tokens: int = setting(256, "Tokens in a chunk, as LMCache's --chunk-size.", minimum=1, maximum=65_536)


def from_parameters(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> LMCacheSettings:
    """Return the settings in an L2 adapter's `adapter_params`. Raises ConfigError."""
    settings = settings_from(LMCacheSettings, SECTION, given, source="adapter_params", environ=environ)
    if not settings.dtype:
        raise ConfigError(
            'adapter_params lack dtype, which LMCache does not provide: add that of the engines\' cache, as "dtype": "bfloat16"'
        )
    return settings


def from_extra_config(extra: Mapping[str, Any], name: str, environ: Mapping[str, str] | None = None) -> LMCacheSettings:
    """Return the settings in the entries `remote_storage_plugin.NAME.*` of LMCache's `extra_config`. Raises
    ConfigError."""
    prefix = f"remote_storage_plugin.{name}."
    given = {entry.removeprefix(prefix): value for entry, value in extra.items() if entry.startswith(prefix)}
    return settings_from(LMCacheSettings, SECTION, given, source=f"extra_config, {prefix}*", engine_names=PLUG_IN_ENTRIES, environ=environ)
