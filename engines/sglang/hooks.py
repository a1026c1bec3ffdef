"""Hooks into SGLang's calls that change weights or drop pages, and into its tree's priorities: the storage back end's
interface reports neither.

They wrap methods of SGLang's classes. SGLang looks the methods up at each call, so a back end that is attached to a
running engine works too. The hooks fit SGLang 0.5.23: attaching to a release that lacks one of the methods raises
ConfigError.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from kvstore.engines.sglang.priorities import PagePriorities
from kvstore.engines.sglang.weights import EngineWeights
from kvstore.protocol.errors import ConfigError

LOG: Final = logging.getLogger("kvstore.engines.sglang")
"""SGLang shows all loggers."""
WEIGHTS: Final = EngineWeights(LOG)
"""State of this process: it has one rank of one engine, whose weights survive the detachment of a back end."""
PRIORITIES: Final = PagePriorities()
"""Those of pages that this process is writing."""
IN_MEMORY: Final = ("load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc")
"""Methods of WeightUpdater that load weights from other sources than files."""


def install() -> None:
    """Wrap SGLang's methods, once per process. Raises ConfigError: this SGLang lacks one of them."""
    if hasattr(HiCacheController.reset, "kvstore"):
        return
    try:
        _wrap(WeightUpdater, "update_weights_from_disk", _from_disk)
        for name in IN_MEMORY:
            _wrap(WeightUpdater, name, _in_memory)
        _wrap(WeightUpdater, "begin_weight_update", _begin)
        _wrap(WeightUpdater, "end_weight_update", _end)
        _wrap(Scheduler, "record_weight_version_change", _record)
        _wrap(HiCacheController, "reset", _flush)
    except AttributeError as error:
        raise ConfigError(f"weight updates of this SGLang cannot be observed: install SGLang 0.5.23 ({error})") from error


def install_priorities() -> None:
    """Wrap the method with which SGLang's tree describes pages to write, once per process. Logs a warning if this
    SGLang lacks it, or its tree is the one in Rust, which shows no priorities: they are no hints then."""
    try:
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache.evict_policy import PriorityStrategy
        from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

        if not hasattr(UnifiedTreeCore.build_storage_backup_spec, "kvstore"):
            _wrap(UnifiedTreeCore, "build_storage_backup_spec", functools.partial(_backup, PriorityStrategy))
        if envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get() == "rust":
            LOG.warning("kvstore: priorities of requests are no retention hints: set SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python")
    except (ImportError, AttributeError) as error:
        LOG.warning("kvstore: priorities of requests are no retention hints: install SGLang 0.5.23 (%s)", error)


def _wrap(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return replacement(original, *arguments, **named)

    wrapped.kvstore = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _from_disk(original: Any, updater: Any, model_path: str, *arguments: Any, **named: Any) -> Any:
    WEIGHTS.updated()
    result = original(updater, model_path, *arguments, **named)
    if result[0] and named.get("weight_name_filter") is None:
        WEIGHTS.loaded(model_path)
    return result


def _in_memory(original: Any, *arguments: Any, **named: Any) -> Any:
    WEIGHTS.updated()
    return original(*arguments, **named)


def _begin(original: Any, *arguments: Any, **named: Any) -> Any:
    WEIGHTS.begin_session()
    return original(*arguments, **named)


def _end(original: Any, *arguments: Any, **named: Any) -> Any:
    result = original(*arguments, **named)
    WEIGHTS.end_session()
    return result


def _record(original: Any, scheduler: Any, new_version: str | None) -> Any:
    result = original(scheduler, new_version)
    WEIGHTS.recorded(new_version, lambda: _is_clean(scheduler))
    return result


def _flush(original: Any, *arguments: Any, **named: Any) -> Any:
    result = original(*arguments, **named)
    WEIGHTS.flushed()
    return result


def _backup(by_priority: type, original: Any, tree: Any, node_id: Any, *arguments: Any, **named: Any) -> Any:
    spec = original(tree, node_id, *arguments, **named)
    if spec is not None and isinstance(tree.eviction_strategy, by_priority):
        PRIORITIES.note(spec.hash_value or (), tree.node_by_id(node_id).priority)
    return spec


def _is_clean(scheduler: Any) -> bool:
    """Return whether the engine has no requests and no pages of the previous weights."""
    return bool(scheduler.is_fully_idle(ignore_waiting=True)) and not any(scheduler.tree_cache.total_size())
