"""Settings of the LMCache plug-ins: `adapter_params` of an L2 adapter, `extra_config` of a remote connector, `KVSTORE_LMCACHE_*`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.client.jobs.config import JobSettings
from kvstore.engines.settings import settings_from
from kvstore.protocol.settings import Size, setting

SECTION: Final = "lmcache"
PLUG_IN_ENTRIES: Final = frozenset({"module_path", "class_name"})
"""Of a remote storage plug-in: LMCache's own."""


@dataclass(frozen=True, slots=True)
class LMCacheSettings:
    """Where the store is, what chunks are called there, and how long LMCache waits for it at the most."""

    master: str = setting("127.0.0.1:7440", "Addresses of the masters, HOST:PORT or unix:PATH, comma separated.")
    tenant: str = setting("", "The tenant whose blocks are seen.")
    token: str = setting("", "The tenant's token.")
    dtype: str = setting(
        "auto",
        "Element type or quantisation of the cache, in the name of its chunks. An L2 adapter is not told it: name it wherever servers of "
        "one model differ in it. A remote connector's chunks have LMCache's.",
    )
    revision: str = setting("", "Of the model's weights, in the name of its chunks.")
    salt: str = setting("", "Makes the keys of chunks unknown to whoever does not have it. Servers share chunks only with equal salts.")
    chunk_tokens: int = setting(256, "Tokens in a chunk, as LMCache's --chunk-size.", minimum=1, maximum=65_536)
    lookup_deadline_s: float = setting(0.5, "Time for a lookup; after that it is a miss.", minimum=0.001, maximum=60)
    load_deadline_s: float = setting(
        5.0, "Time for the chunks of one task to come; after that those which have not are misses.", minimum=0.001, maximum=3600
    )
    store_deadline_s: float = setting(
        30.0, "Time for the chunks of one task to be stored; after that it has failed.", minimum=0.001, maximum=3600
    )
    write_behind_bytes: Size = setting(
        Size(1 << 30), "Chunks that may wait to be stored, in LMCache's own memory; what does not fit is not stored.", minimum=1 << 20
    )


def jobs_settings(settings: LMCacheSettings) -> JobSettings:
    return JobSettings(
        queue_bytes=settings.write_behind_bytes,
        lookup_deadline_s=settings.lookup_deadline_s,
        load_deadline_s=settings.load_deadline_s,
        store_deadline_s=settings.store_deadline_s,
    )


def from_parameters(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> LMCacheSettings:
    """What `adapter_params`, or the entries of a remote connector, say. Raises ConfigError."""
    return settings_from(LMCacheSettings, SECTION, given, source="adapter_params", environ=environ)


def from_extra_config(extra: Mapping[str, Any], name: str, environ: Mapping[str, str] | None = None) -> LMCacheSettings:
    """What the entries `remote_storage_plugin.NAME.*` of LMCache's `extra_config` say. Raises ConfigError."""
    prefix = f"remote_storage_plugin.{name}."
    given = {entry.removeprefix(prefix): value for entry, value in extra.items() if entry.startswith(prefix)}
    return settings_from(LMCacheSettings, SECTION, given, source=f"extra_config, {prefix}*", engine_names=PLUG_IN_ENTRIES, environ=environ)
