"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`; else `KVSTORE_VLLM_*`, or [vllm] in the file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.client.jobs.config import JobSettings
from kvstore.engines.settings import FINGERPRINT_CHOICES, FINGERPRINT_HELP, REVISION_HELP, settings_from
from kvstore.protocol.settings import Size, setting
from kvstore.protocol.variables import MASTER
from kvstore.security.tls.config import TlsSettings

SECTION: Final = "vllm"
LOAD_THREADS: Final = 4
"""Requests whose blocks are loaded at once: one that waits for a node that hangs does not hold up the others."""


@dataclass(frozen=True, slots=True)
class VllmSettings(TlsSettings):
    """Where the store is, what blocks are called there, and how long the engine waits for it at the most."""

    master: str = setting("127.0.0.1:7440", "Addresses of the masters, HOST:PORT or unix:PATH, comma separated.", variable=MASTER)
    tenant: str = setting("", "The tenant whose blocks are seen.")
    token: str = setting("", "The tenant's token.")
    model: str = setting(
        "",
        "Name of the model, in the key of its blocks: for people, and for weights that no fingerprint identifies. Empty: its architecture, "
        "and the name or path that vLLM was given where there is no fingerprint.",
    )
    fingerprint: str = setting("sampled", FINGERPRINT_HELP, choices=FINGERPRINT_CHOICES)
    revision: str = setting("", REVISION_HELP)
    resets_keep_weights: bool = setting(
        False,
        "The engine's caches are reset for other reasons than new weights, so that a reset without a name for the weights keeps their "
        "identity. Off: it gives the engine a version of its own, which nothing is shared under until it is named.",
    )
    salt: str = setting("", "Makes the keys of blocks unknown to whoever does not have it. Engines share blocks only with equal salts.")
    share_tp: int = setting(
        0,
        "Values in which the KV heads of a block are stored, so that engines of any tensor parallelism share it: a divisor of the model's "
        "KV heads and a multiple of each engine's TP, equal in all these engines. 0: one value a rank, shared by engines of equal TP.",
        minimum=0,
        maximum=1024,
    )
    load_async: bool = setting(
        True,
        "Load blocks between the steps of the engine, beside other requests. Off: the step that needs them waits for them, of engines that "
        "schedule one step at a time.",
    )
    load_by_layer: bool = setting(
        False,
        "With load_async off, on a CPU, of blocks on this host: each layer of the step waits for its own part of them only, while parts of "
        "the layers behind it are loaded.",
    )
    lookup_deadline_s: float = setting(
        0.1, "Time to ask which blocks the store has; after that a request is a miss.", minimum=0.001, maximum=60
    )
    lookup_interval_s: float = setting(
        1.0,
        "Age from which a lookup's result is not reused. Requests that wait in vLLM's queue are looked up again then, all in one message.",
        minimum=0,
        maximum=60,
    )
    hold_s: float = setting(
        10.0,
        "How long blocks that a lookup found stay in the store unless their request is loaded or over sooner. It covers the time in the "
        "queue until the next lookup and the load. 0: nothing is held.",
        minimum=0,
        maximum=3600,
    )
    prefill_wait_s: float = setting(
        2.0,
        "Time that a request whose prompt another engine computed waits for blocks that one is still storing; then it is computed.",
        minimum=0,
        maximum=600,
    )
    load_deadline_s: float = setting(
        5.0, "Time for the blocks of one request to come; after that those which have not are computed.", minimum=0.001, maximum=3600
    )
    save_deadline_s: float = setting(
        30.0, "Time for the blocks that one request has filled to be stored; after that they are dropped.", minimum=0.001, maximum=3600
    )
    write_behind_bytes: Size = setting(
        Size(512 << 20), "Copies of blocks that may wait to be stored; blocks that do not fit are not stored.", minimum=1 << 20
    )


def from_extra_config(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> VllmSettings:
    """What `kv_connector_extra_config` says. Raises ConfigError: an unknown setting, or a value outside its range."""
    return settings_from(VllmSettings, SECTION, given, source="kv_connector_extra_config", environ=environ)


def job_settings(settings: VllmSettings) -> JobSettings:
    """Of a rank's jobs."""
    return JobSettings(
        read_workers=LOAD_THREADS,
        queue_bytes=settings.write_behind_bytes,
        lookup_deadline_s=settings.lookup_deadline_s,
        load_deadline_s=settings.load_deadline_s,
        store_deadline_s=settings.save_deadline_s,
    )
