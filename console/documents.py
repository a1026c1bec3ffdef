"""Further JSON documents of the page (hosts, directory contents, slow requests) and their cache.

Documents are cached for some seconds, so that many readers cost as much as one.
"""

import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ProtocolError
from kvstore.transfer.topology.json_form import as_json, parse_topology

MAX_CACHED = 64
FAILURE_S: Final = 1.0
"""Time for which a failure is cached, so that many readers do not request from an unreachable master without a pause."""


def host(found: pb.NodeTopology) -> dict[str, Any]:
    """Return a node's host: `topology` as reported (docs/topology.md), or null and the reason in `note`."""
    topology, note = None, ""
    if not found.topology:
        note = "it has not reported its topology"
    else:
        try:
            topology = as_json(parse_topology(found.topology))
        except ProtocolError as error:  # a node of another release must not hide the others
            note = f"its topology cannot be read: {error}"
    return {"node": found.name, "state": found.state, "topology": topology, "note": note}


def contents(reply: pb.ContentsReply) -> dict[str, Any]:
    """Return the namespaces, and the prefix tree of one of them as segments: `parent` is an index into the list, null for a root."""
    return {
        "namespaces": [
            {
                "tenant": one.tenant,
                "namespace": one.namespace,
                "pinned": one.pinned,
                "model": one.model,
                "layout": one.layout,
                "weights": one.weights,
                "read_age_s": one.read_age_s if one.HasField("read_age_s") else None,
                "users": list(one.users),
                "is_used": one.is_used,
                "is_retired": one.is_retired,
                **_stored(one.stored),
            }
            for one in reply.namespaces
        ],
        "segments": [
            {
                "parent": one.parent - 1 if one.parent else None,
                "key": one.key.hex(),
                "subtree_bytes": one.subtree_bytes,
                "branches": one.branches,
                "reads_per_s": one.reads_per_s,
                "subtree_reads_per_s": one.subtree_reads_per_s,
                **_stored(one.stored),
            }
            for one in reply.segments
        ],
    }


def slow_request(one: pb.SlowRequest) -> dict[str, Any]:
    """Return a slow request as a JSON object."""
    return {
        "tenant": one.tenant,
        "operation": one.operation,
        "duration_s": one.duration_us / 1e6,
        "time_s": one.time_s,
        "at": one.at,
        "peer": one.peer,
    }


def _stored(stored: pb.StorageUsage) -> dict[str, int]:
    return {
        "blocks": stored.blocks,
        "bytes": stored.bytes,
        "hbm_bytes": stored.hbm_bytes,
        "dram_bytes": stored.dram_bytes,
        "nvme_bytes": stored.nvme_bytes,
    }


class CachedCalls:
    """Cache of call results with a time to live. Thread-safe.

    Concurrent calls with one key make a single call, and all get its result or error. Calls with other keys do not wait for it.
    """

    def __init__(self, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._cached: dict[Hashable, tuple[float, Future[Any]]] = {}
        """Key -> expiry (infinite while the call is under way), and the result."""
        self._lock = threading.Lock()

    def get(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """Return the cached result for this key, or call `call`. Raises its error, which is cached for FAILURE_S."""
        with self._lock:
            until_s, result = self._cached.get(key, (0.0, Future[Any]()))
            is_cached = self._clock() < until_s
            if not is_cached:
                result = Future()
                self._store(key, math.inf, result)
        if not is_cached:
            ttl_s = self._ttl_s
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)
                ttl_s = min(ttl_s, FAILURE_S)
            with self._lock:
                self._store(key, self._clock() + ttl_s, result)
        return result.result()

    def _store(self, key: Hashable, until_s: float, result: "Future[Any]") -> None:
        self._cached.pop(key, None)
        if len(self._cached) >= MAX_CACHED:
            del self._cached[next(iter(self._cached))]
        self._cached[key] = (until_s, result)
