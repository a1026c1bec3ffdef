"""Settings of the vLLM connector and tier.

Sources: `kv_connector_extra_config` in vLLM's `--kv-transfer-config`, then `KVSTORE_VLLM_*`, then [vllm] in the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.jobs.config import JobSettings
from kvstore.engines.settings import StoreSettings, settings_from
from kvstore.protocol import shared_settings
from kvstore.protocol.settings import Size, setting

SECTION: Final = "vllm"
LOAD_THREADS: Final = 4
"""Requests, or jobs of a tier, that load concurrently, so that one stuck node does not block the others."""
CONNECT_TIMEOUT_S: Final = 0.5
"""Time for a master to accept a connection; after it the engine computes instead."""


@dataclass(frozen=True, slots=True)
class VllmSettings(StoreSettings):
    """Settings of a connector or an offloading tier."""

    model: str = shared_settings.MODEL()
    resets_keep_weights: bool = setting(
        False,
        "Resets of the engine's caches do not mean new weights: a reset without a new weight version keeps the weights' "
        "identity. Off: a reset gives the engine a private version, whose blocks are not shared until the weights are named.",
    )
    share_tp: int = shared_settings.SHARE_TP()
    lookup_deadline_s: float = shared_settings.LOOKUP_DEADLINE_S(default=0.1)
    prefill_wait_s: float = setting(
        2.0,
        "Time that a decode request waits for blocks that the prefill engine is still storing; then it computes them.",
        minimum=0,
        maximum=600,
    )
    write_behind_bytes: Size = setting(
        Size(512 << 20), "Copies of blocks that may wait to be stored; blocks that do not fit are not stored.", minimum=1 << 20
    )

    def client(self) -> ClientSettings:
        return replace(StoreSettings.client(self), connect_timeout_s=CONNECT_TIMEOUT_S)

    def jobs(self) -> JobSettings:
        """Return settings with one read worker, which probes an unreachable store; lookups and loads run in threads
        of the engine and `Worker`."""
        return replace(StoreSettings.jobs(self), read_workers=1, queue_bytes=self.write_behind_bytes)


def from_extra_config(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> VllmSettings:
    """Return the settings in `kv_connector_extra_config`. Raises ConfigError: an unknown setting, or a value outside
    its range."""
    return settings_from(VllmSettings, SECTION, given, source="kv_connector_extra_config", environ=environ)


def connect(settings: VllmSettings) -> Client:
    """Return a client that has not connected yet. Each role and rank has its own, because they may be separate
    processes."""
    return Client(settings=settings.client())
