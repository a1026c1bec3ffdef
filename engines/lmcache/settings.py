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
        "it: servers of one model with different types would read each other's chunks. A remote connector takes it from LMCache, and needs "
        "it only for quantised caches, which LMCache calls uint8 or int8.",
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


STORAGE_DTYPES: Final = frozenset({"uint8", "int8"})
"""LMCache's names of several element types that vLLM stores as bytes: fp8_e4m3, fp8_e5m2, nvfp4, ..."""


def element_type(settings: LMCacheSettings, stored_as: str) -> str:
    """Return the element type in the keys of a remote connector. `stored_as`: LMCache's name of the type. Raises
    ConfigError: it stands for several, and the setting `dtype` is empty."""
    if not settings.dtype and stored_as in STORAGE_DTYPES:
        raise ConfigError(
            f"LMCache calls the cache's element type {stored_as}, as it does several: add the engine's --kv-cache-dtype to extra_config, "
            'as "remote_storage_plugin.NAME.dtype": "fp8_e4m3"'
        )
    return settings.dtype or stored_as


def from_extra_config(extra: Mapping[str, Any], name: str, environ: Mapping[str, str] | None = None) -> LMCacheSettings:
    """Return the settings in the entries `remote_storage_plugin.NAME.*` of LMCache's `extra_config`. Raises
    ConfigError."""
    prefix = f"remote_storage_plugin.{name}."
    given = {entry.removeprefix(prefix): value for entry, value in extra.items() if entry.startswith(prefix)}
    return settings_from(LMCacheSettings, SECTION, given, source=f"extra_config, {prefix}*", engine_names=PLUG_IN_ENTRIES, environ=environ)
