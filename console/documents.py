"""Documents of the page beside the cluster's: hosts with their NICs and GPUs, what the directory holds, slow requests; and their cache.

Each document is kept for some seconds, so that many readers cost what one does.
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

MAX_KEPT = 64
FAILURE_S: Final = 1.0
"""For which it is kept that there is no answer: who asks a master that is silent again and again would have it asked without a pause."""


def host(found: pb.NodeTopology) -> dict[str, Any]:
    """A node's host: `topology` as the node told it (docs/topology.md), or null and in `note` why."""
    topology, note = None, ""
    if not found.topology:
        note = "it has not told its topology"
    else:
        try:
            topology = as_json(parse_topology(found.topology))
        except ProtocolError as error:  # one node of another release must not hide the others
            note = f"its topology cannot be read: {error}"
    return {"node": found.name, "state": found.state, "topology": topology, "note": note}


def contents(reply: pb.ContentsReply) -> dict[str, Any]:
    """Namespaces, and the tree of one of them as segments: `parent` is an index of the list, null for one that begins a prompt."""
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
    """A slow request."""
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
    """Thread-safe. Calls of one key at once are one call, and the others wait for it, whatever comes of it; other keys' do not."""

    def __init__(self, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._kept: dict[Hashable, tuple[float, Future[Any]]] = {}
        """Until when each is good; without an end while it is being asked for."""
        self._lock = threading.Lock()

    def get(self, key: Hashable, ask: Callable[[], Any]) -> Any:
        """What `ask` returned for this key lately, or returns now. Raises what it raises, or raised within FAILURE_S."""
        with self._lock:
            until_s, answer = self._kept.get(key, (0.0, Future[Any]()))
            is_asked = self._clock() < until_s
            if not is_asked:
                answer = Future()
                self._keep(key, math.inf, answer)
        if not is_asked:
            ttl_s = self._ttl_s
            try:
                answer.set_result(ask())
            except BaseException as error:
                answer.set_exception(error)
                ttl_s = min(ttl_s, FAILURE_S)
            with self._lock:
                self._keep(key, self._clock() + ttl_s, answer)
        return answer.result()

    def _keep(self, key: Hashable, until_s: float, answer: "Future[Any]") -> None:
        self._kept.pop(key, None)
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = (until_s, answer)
