"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`; else `KVSTORE_VLLM_*`, or [vllm] in the file."""

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
"""Requests, or jobs of a tier, that are loaded at once: one that waits for a node that hangs does not hold up the others."""
CONNECT_TIMEOUT_S: Final = 0.5
"""Time for a master to accept a connection; then the engine computes instead."""


@dataclass(frozen=True, slots=True)
class VllmSettings(StoreSettings):
    """Settings of a connector or an offloading tier."""

    model: str = shared_settings.MODEL()
    resets_keep_weights: bool = setting(
        False,
        "The engine's caches are reset for other reasons than new weights, so that a reset without a name for the weights keeps their "
        "identity. Off: it gives the engine a version of its own, which nothing is shared under until it is named.",
    )
    share_tp: int = shared_settings.SHARE_TP()
    lookup_deadline_s: float = shared_settings.LOOKUP_DEADLINE_S(default=0.1)
    prefill_wait_s: float = setting(
        2.0,
        "Time that a request whose prompt another engine computed waits for blocks that one is still storing; then it is computed.",
        minimum=0,
        maximum=600,
    )
    write_behind_bytes: Size = setting(
        Size(512 << 20), "Copies of blocks that may wait to be stored; blocks that do not fit are not stored.", minimum=1 << 20
    )

    def client(self) -> ClientSettings:
        return replace(StoreSettings.client(self), connect_timeout_s=CONNECT_TIMEOUT_S)

    def jobs(self) -> JobSettings:
        """One thread looks for a store that is away: lookups and loads are carried out by threads of the engine and of `Worker`."""
        return replace(StoreSettings.jobs(self), read_workers=1, queue_bytes=self.write_behind_bytes)


def from_extra_config(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> VllmSettings:
    """Return what `kv_connector_extra_config` says. Raises ConfigError: an unknown setting, or a value outside its range."""
    return settings_from(VllmSettings, SECTION, given, source="kv_connector_extra_config", environ=environ)


def connect(settings: VllmSettings) -> Client:
    """Return a client that has sent nothing yet. Each role and rank of an engine has its own: they may be separate processes."""
    return Client(settings=settings.client())
