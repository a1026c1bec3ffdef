"""Wrappers around methods of vLLM's EngineCore that change weights, and the drain of loads and copies before them.

**Wrappers.** The scheduler's connector lives in the process of EngineCore. vLLM notifies a connector of resets only,
not of weight names, updates, reloads or sleep. So a few methods of EngineCore are wrapped, once per process; each
reports to the connector's `Variants`.

**Drain.** vLLM's reset fails while a connector holds blocks: those of requests that wait for a load, which vLLM cannot
preempt, and those of finished requests that wait to be copied. Blocks that are loaded meanwhile belong to the old
weights. So loads and copies end before caches are reset or weights change.

The engine's thread calls all of it.
"""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import RequestStatus

from kvstore.engines.vllm.checkpoint import sample_weights
from kvstore.engines.vllm.counters import LOG
from kvstore.engines.vllm.variants import LoraRequest, Variants


class StoreConnector(Protocol):
    """The part of the scheduler's connector that is used here. Its `has_pending_push_work` keeps the engine stepping
    while loads run."""

    variants: Variants
    drain_deadline_s: float
    """Upper bound of the time that loads and copies take."""

    def requeued(self, request_ids: list[str]) -> None:
        """The scheduler took back the blocks that these requests were to load into."""


def drain(connector: StoreConnector, engine: Any) -> None:
    """Step the engine, without computing, until loads are done and finished requests have released their blocks.

    Blocks that are loading, or loaded and unused, hold data of the old weights: the engine takes them back and queues
    their requests as new. vLLM's cache reset would fail otherwise, because requests that wait for a load cannot be
    preempted. Returns at the connector's deadline even if loads are left.
    """
    scheduler = engine.scheduler
    is_process = isinstance(engine, EngineCoreProc)
    if not (engine.batch_queue or scheduler.has_finished_requests() or scheduler.kv_holding_waiting):
        return
    if not is_process and engine.batch_queue and scheduler.running:
        return  # a step would return tokens that its caller waits for
    state = scheduler.pause_state
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    until_s = time.monotonic() + connector.drain_deadline_s
    try:
        while (engine.batch_queue or scheduler.has_requests()) and time.monotonic() < until_s:
            if is_process:
                engine._process_engine_step()
            else:
                engine.step_fn()
    finally:
        scheduler.set_pause_state(state)
    connector.requeued(_requeue_loaded(scheduler))


def _requeue_loaded(scheduler: Any) -> list[str]:
    """Queue requests with loaded blocks as new, like vLLM does after a failed load. Return their ids."""
    requeued = []
    for request in reversed(list(scheduler.kv_holding_waiting)):
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in scheduler.finished_recving_kv_req_ids:
                continue
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
            scheduler._handle_blocked_waiting_request(request)  # frees its blocks
        elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            scheduler.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
        else:
            continue
        scheduler.kv_holding_waiting.remove_requests([request])
        scheduler.waiting.prepend_request(request)
        scheduler.deferred_waiting.discard(request)
        scheduler._inflight_prefills.discard(request)
        scheduler._set_kv_fetch_stage(request, None)
        requeued.append(request.request_id)
    return requeued


UPDATES: Final = frozenset({"start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update", "reset_weights"})
"""vLLM's own worker methods that change weights."""
RELOAD: Final = "reload_weights"
READ_ONLY_METHODS: Final = frozenset(
    {"check_health", "compute_weight_checksums", "init_weight_transfer_engine", "list_loras", "profile", "shutdown_weight_transfer_engine"}
)
"""Frequent worker methods that change no weights. For all others, samples of the weights show whether they did."""


def watch_engines() -> None:
    """Wrap the methods of EngineCore that are not wrapped yet. Logs a warning for a method that this vLLM lacks."""
    for name, around in WRAPPERS.items():
        method = getattr(EngineCore, name, None)
        if method is None:
            LOG.warning("kvstore: this vLLM has no EngineCore.%s: changes of weights are only seen at cache resets", name)
        elif not hasattr(method, "of_kvstore"):
            setattr(EngineCore, name, _wrapped(method, around))


def _wrapped(method: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
        connector = _connector(engine)
        original = functools.partial(method, engine, *args, **kwargs)
        return original() if connector is None else around(connector, engine, original, *args, **kwargs)

    call.of_kvstore = True  # type: ignore[attr-defined]
    return call


def _connector(engine: Any) -> StoreConnector | None:
    """Return the engine's KVStoreConnector, also if it is one of a MultiConnector's; None without one."""
    scheduler = getattr(engine, "scheduler", None)
    connector = scheduler.get_kv_connector() if scheduler is not None else None
    return next((one for one in getattr(connector, "_connectors", [connector]) if getattr(one, "variants", None) is not None), None)


# --- wrappers: (connector, engine, original call, its arguments) ---
def _set_weight_version(connector: StoreConnector, engine: Any, call: Callable[[], Any], weight_version: str) -> None:
    drain(connector, engine)
    call()
    connector.variants.named(weight_version)


def _collective_rpc(
    connector: StoreConnector,
    engine: Any,
    call: Callable[[], Any],
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if method in READ_ONLY_METHODS or (connector.variants.compares_on_wake and engine.model_executor.is_sleeping):
        return call()
    if method in UPDATES:
        drain(connector, engine)
        connector.variants.changing()
        return call()
    iterator, path, *_ = (*args, None, None)
    named = kwargs or {}
    if method == RELOAD and named.get("weights_iterator", iterator) is None:
        drain(connector, engine)
        connector.variants.reloading(named.get("weights_path", path))
        result = call()
        connector.variants.reloaded()
        return result
    before = _sample(engine)
    result = call()
    if before is None or _sample(engine) != before:
        LOG.info("kvstore: the call of %s changed the engine's weights", method)
        drain(connector, engine)
        connector.variants.changing()
    return result


def _reset_prefix_cache(
    connector: StoreConnector,
    engine: Any,
    call: Callable[[], bool],
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> bool:
    if reset_running_requests or reset_connector:
        drain(connector, engine)
    is_done = call()
    if not engine.is_scheduler_paused():
        connector.variants.resumed()
    return is_done


def _sleep(connector: StoreConnector, engine: Any, call: Callable[[], Any], level: int = 1, mode: str = "abort") -> Any:
    if level < 1 or engine.model_executor.is_sleeping:
        return call()
    connector.variants.sleeping(level, _sample(engine))
    try:
        sleeping = call()
    except BaseException:
        connector.variants.awake(None)
        raise
    if isinstance(sleeping, Future):
        sleeping.add_done_callback(lambda done: connector.variants.awake(None) if done.exception() is not None else None)
    return sleeping


def _release_kv_cache_memory(connector: StoreConnector, engine: Any, call: Callable[[], None]) -> None:
    _sleep(connector, engine, call)


def _wake_up(connector: StoreConnector, engine: Any, call: Callable[[], bool], tags: list[str] | None = None) -> bool:
    is_awake = call()
    if is_awake:
        connector.variants.awake(_sample(engine) if connector.variants.compares_on_wake else None)
    return is_awake


def _resume_scheduler(connector: StoreConnector, engine: Any, call: Callable[[], None]) -> None:
    call()
    connector.variants.resumed()


def _add_lora(connector: StoreConnector, engine: Any, call: Callable[[], bool], lora_request: LoraRequest) -> bool:
    if lora_request.load_inplace:
        drain(connector, engine)
    is_added = call()
    connector.variants.adapter_added(lora_request, time.monotonic())
    return is_added


def _remove_lora(connector: StoreConnector, engine: Any, call: Callable[[], bool], lora_id: int) -> bool:
    connector.variants.adapter_removed(lora_id)
    return call()


WRAPPERS: Final[dict[str, Callable[..., Any]]] = {
    "set_weight_version": _set_weight_version,
    "collective_rpc": _collective_rpc,
    "reset_prefix_cache": _reset_prefix_cache,
    "sleep": _sleep,
    "release_kv_cache_memory": _release_kv_cache_memory,
    "wake_up": _wake_up,
    "resume_scheduler": _resume_scheduler,
    "add_lora": _add_lora,
    "remove_lora": _remove_lora,
}


def _sample(engine: Any) -> str | None:
    """Return the hash of samples of all ranks' weights; None if the weights cannot be sampled now."""
    executor = engine.model_executor
    if executor.is_sleeping:
        return None
    try:
        return " ".join(executor.collective_rpc(sample_weights))
    except Exception as error:
        LOG.warning("kvstore: the engine's weights cannot be sampled, and count as changed: %s", error)
        return None
