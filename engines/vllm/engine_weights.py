"""Weights of a vLLM engine: the files of its model, draft model and LoRAs, and its `Variants`."""

import contextlib
import itertools
import multiprocessing
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
from vllm.config import VllmConfig

from kvstore.engines.vllm import fields
from kvstore.engines.vllm.checkpoint import WatchedCheckpoint, WeightFiles, WeightsSource
from kvstore.engines.vllm.engine_calls import watch_engines
from kvstore.engines.vllm.facts import draft_models, revision
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.variants import Adapters, Variants
from kvstore.engines.weights.files import ADAPTER_CONFIG, find_checkpoint
from kvstore.engines.weights.fingerprint import Mode, adapter_fingerprint, stamp


def follow_weights(vllm_config: VllmConfig, settings: VllmSettings, *, on_change: Callable[[], None]) -> Variants:
    """Start to identify an engine's weights and to intercept the calls that change them. Call it after the weights are
    loaded.

    Raises:
        ConfigError: the weights cannot be identified.
    """
    # An engine process of its own started after the files were written and before the engine read them.
    is_engine_process = multiprocessing.parent_process() is not None
    since_ns = int((psutil.Process().create_time() if is_engine_process else time.time()) * 1e9)
    checkpoint = WatchedCheckpoint(weights_source(vllm_config, settings), loaded_since_ns=since_ns)
    engine = uuid.uuid4().hex
    variants = Variants(
        checkpoint,
        Adapters(LoraFiles(vllm_config, settings), on_change),
        nonce=(f"{engine}-{count}" for count in itertools.count()).__next__,
        on_change=on_change,
        resets_keep_weights=settings.resets_keep_weights,
    )
    watch_engines()
    checkpoint.wait()
    return variants


def weights_source(vllm_config: VllmConfig, settings: VllmSettings) -> WeightsSource:
    """Return what the engine loads its weights from."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        return WeightsSource((), text=f"random, seed {model.seed}", revision=settings.revision)
    hub_cache = Path(load.download_dir) if load.download_dir else None
    files = [WeightFiles(str(one.model_weights or one.model), revision(one), hub_cache) for one in (model, *draft_models(vllm_config))]
    files[0] = replace(files[0], name=settings.model)
    return WeightsSource(tuple(files), settings.fingerprint, settings.revision)


class LoraFiles:
    """Files of LoRAs on this machine. Implements `variants.AdapterFiles`."""

    def __init__(self, vllm_config: VllmConfig, settings: VllmSettings) -> None:
        self._mode: Mode = "full" if settings.fingerprint == "full" else "sampled"
        lora = vllm_config.lora_config
        self._settings = fields.digest(fields.values(lora)) if lora is not None else ""

    def fingerprint(self, path: str) -> str:
        return f"{adapter_fingerprint(find_checkpoint(path) or path, mode=self._mode)} {self._settings}"

    def stamp(self, path: str) -> bytes:
        found = find_checkpoint(path)
        if found is None or not (weights := stamp(found)):
            return b""
        with contextlib.suppress(OSError):
            config = os.stat(found / ADAPTER_CONFIG)
            return weights + repr((config.st_ino, config.st_size, config.st_mtime_ns, config.st_ctime_ns)).encode()
        return weights
