"""Settings of the SGLang plug-in: `--hicache-storage-backend-extra-config`, else `KVSTORE_SGLANG_*` or [sglang] in the TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.engines.settings import StoreSettings, settings_from
from kvstore.protocol import shared_settings

SECTION: Final = "sglang"
ENGINE_ENTRIES: Final = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
"""SGLang's own entries of the same mapping."""


@dataclass(frozen=True, slots=True)
class SGLangSettings(StoreSettings):
    """Settings of a HiCache storage back end."""

    model: str = shared_settings.MODEL()
    share_tp: int = shared_settings.SHARE_TP()


def from_extra_config(extra: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> SGLangSettings:
    """Return the settings. Raises ConfigError: an unknown setting, or a value outside its range."""
    return settings_from(
        SGLangSettings, SECTION, extra or {}, source="hicache_storage_backend_extra_config", engine_names=ENGINE_ENTRIES, environ=environ
    )
