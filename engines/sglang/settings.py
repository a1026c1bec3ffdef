"""Settings of the SGLang plug-in: `--hicache-storage-backend-extra-config`, else `KVSTORE_SGLANG_*` or [sglang] in the TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.engines.settings import StoreSettings, settings_from
from kvstore.protocol.settings import setting

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
"""Of the same mapping: SGLang's own."""


@dataclass(frozen=True, slots=True)
class SGLangSettings(StoreSettings):
    """Of a HiCache storage back end."""

    model: str = setting(
        "",
        "Engines share pages of models with equal names; empty: the name or path that SGLang was given. Set it where one has many paths.",
    )
    share_tp: int = setting(
        0,
        "Values in which the KV heads of a page are stored, so that engines of any tensor parallelism share it: a divisor of the model's "
        "KV heads and a multiple of each engine's TP, equal in all these engines. 0: SGLang's `tp_lcm_size`, where that is set; else one "
        "value a rank, shared by engines of equal TP.",
        minimum=0,
        maximum=1024,
    )


def from_extra_config(extra: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> SGLangSettings:
    """Raises ConfigError: an unknown setting, or a value outside its range."""
    return settings_from(
        SGLangSettings, SECTION, extra or {}, source="hicache_storage_backend_extra_config", engine_names=ENGINE_ENTRIES, environ=environ
    )
