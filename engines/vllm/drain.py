"""The end of loads and copies before vLLM resets its caches or its weights change.

vLLM's reset fails while a connector holds blocks: those of requests that wait for a load, which it cannot preempt, and of requests that are
over and wait to be copied. And what is loaded meanwhile is of the weights before.
"""

import time
from typing import Any, Protocol

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import RequestStatus


class DrainedConnector(Protocol):
    """The part of the scheduler's connector that is used here. Its `has_pending_push_work` keeps the engine stepping while loads are under
    way."""

    drain_deadline_s: float
    """How long loads and copies take at most."""

    def requeued(self, request_ids: list[str]) -> None:
        """The scheduler took back what it had given these requests to load into."""


def drain(connector: DrainedConnector, engine: Any) -> None:
    """Have the engine finish loads, and let go of the blocks of requests that are over. It computes nothing meanwhile.

    Blocks that are being loaded, or were loaded and not used, go back to the engine with their requests queued as if they were new: what
    they hold is of the weights before. Without it vLLM's reset of its caches fails, for requests that wait for a load cannot be preempted.
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
    """As vLLM does with a request whose load has failed whole."""
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
