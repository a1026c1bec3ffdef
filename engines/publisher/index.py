"""Index of blocks for other routers: blocks of registered engines, and blocks that all of them reach in the store.

- **Threads.** One thread per registered engine subscribes to its events; one lock guards the shared table.
- **Dead engines.** If an engine's replay endpoint does not respond, its blocks are dropped, so that routers do not
  prefer it. Without a replay endpoint a dead engine keeps its blocks until it is unregistered or publishes again.
- **The store's media.** A block in a node's memory counts as `cpu`, one in NVMe as `disk`.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvstore.client.sync import Client
from kvstore.engines.kv_events.events import CPU, DISK, Event
from kvstore.engines.kv_events.subscriber import Subscriber
from kvstore.engines.publisher.prefix_table import Context, InstanceMatch, PrefixTable, Service
from kvstore.kvcache.key_names import NamespaceNaming, Naming
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import KVStoreError

WAIT_S: Final = 0.2
"""Maximum wait for events before a thread checks whether to stop."""
VERIFY_S: Final = 10.0
"""Interval at which each publisher is asked for a replay, which shows whether it is alive."""
REPLAY_TIMEOUT_S: Final = 5.0
JOIN_S: Final = 10.0
DEADLINE_S: Final = 1.0
"""Deadline of a lookup in the store; Mooncake's clients wait as long for a response."""
NVME: Final = "nvme"
DTYPE: Final = "bfloat16"
"""Of namespaces that name blocks in the table only; the store has none of their keys."""

log = logging.getLogger("kvstore.publisher")


class StoreMedia:
    """Media in which the store has the blocks of one model. Thread-safe. The owner closes the client."""

    def __init__(self, client: Client, naming: Naming, *, model: str) -> None:
        """Create it. `model`: the name that routers use for the model of `naming`."""
        self._client = client
        self._model = model
        self.naming = naming
        self._is_silent = False

    def has(self, context: Context) -> bool:
        """Return whether the store's blocks are of this context: its model and block size, without an adapter or a
        salt."""
        return (context.model, context.block_tokens, context.adapter, context.salt) == (self._model, self.naming.block_tokens, "", "")

    def media(self, keys: Sequence[bytes]) -> list[str]:
        """Return `cpu` or `disk` for each readable block, "" for the others; [] if the store does not respond in
        time."""
        try:
            found = self._client.locate(keys, deadline_s=DEADLINE_S) if keys else []
        except KVStoreError as error:
            if not self._is_silent:
                log.warning("routers get no blocks of the store: %s", error)
            self._is_silent = True
            return []
        self._is_silent = False
        return [_medium({tier for replica in replicas for tier in replica.tiers}) for replicas in found]


def _medium(tiers: set[str]) -> str:
    if tiers - {NVME}:
        return CPU
    return DISK if tiers else ""


class EngineBlockIndex:
    """Index of the blocks of registered engines and of the store. Thread-safe. Close it."""

    def __init__(self, store: StoreMedia | None, *, verify_s: float = VERIFY_S, replay_timeout_s: float = REPLAY_TIMEOUT_S) -> None:
        """Create it without engines. `store`: blocks that every instance reaches; None: only engines are indexed."""
        self._store = store
        self._table = PrefixTable(self._naming)
        self._lock = threading.Lock()
        """Guards the table and `_threads`."""
        self._verify_s = verify_s
        self._replay_timeout_s = replay_timeout_s
        self._threads: dict[str, tuple[threading.Event, threading.Thread]] = {}

    @property
    def services(self) -> int:
        """Number of registered services."""
        with self._lock:
            return len(self._table.services)

    def tokens_of(self, key: bytes) -> list[int] | None:
        """Return the token ids of a block of the store, if a registered engine published them recently."""
        with self._lock:
            return self._table.tokens_of(key)

    def match(self, context: Context, token_ids: list[int], *, instance: str | None = None) -> dict[str, InstanceMatch]:
        """Return what each instance of the context holds of a prompt; `instance`: only that one. Raises
        InvalidArgument."""
        keys = self._naming(context).block_keys(token_ids)
        in_store = self._store.media(keys) if self._store is not None and self._store.has(context) else []
        with self._lock:
            return self._table.match(context, keys, instance=instance, in_store=in_store)

    def add(self, service: Service) -> None:
        """Subscribe to a service's events, unless it is registered. Raises InvalidArgument, also for a malformed
        endpoint; Full."""
        subscriber = Subscriber(service.endpoint, service.replay_endpoint, replay_timeout_s=self._replay_timeout_s)
        with self._lock:
            try:
                is_new = self._table.add(service)
            except KVStoreError:
                subscriber.close()
                raise
            if not is_new:
                subscriber.close()
                return
            ending = threading.Event()
            thread = threading.Thread(target=self._follow, args=(service, subscriber, ending), name=f"events-{service.name}", daemon=True)
            self._threads[service.name] = (ending, thread)
        thread.start()
        log.info("events of %s are read at %s", service.name, service.endpoint)

    def remove(self, name: str) -> Service | None:
        """Unregister and return a service; None if no service has this name. Does not wait for its thread."""
        with self._lock:
            service = self._table.remove(name)
            if service is not None:
                self._threads.pop(name)[0].set()
        return service

    def close(self) -> None:
        """Stop the threads, at most within JOIN_S; one that waits for a replay may outlive the call."""
        with self._lock:
            threads = list(self._threads.values())
        for ending, _ in threads:
            ending.set()
        until_s = time.monotonic() + JOIN_S
        for _, thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _follow(self, service: Service, subscriber: Subscriber, ending: threading.Event) -> None:
        def apply(events: list[Event]) -> None:
            with self._lock:
                self._table.apply(service, events)

        def lost() -> None:
            with self._lock:
                self._table.clear(service)

        verify_at_s, complaint = 0.0, ""
        while not ending.is_set():
            try:
                if time.monotonic() >= verify_at_s and (service.replay_endpoint or not verify_at_s):
                    verify_at_s = time.monotonic() + self._verify_s
                    subscriber.catch_up(apply, lost)
                    complaint = ""
                subscriber.take(WAIT_S, apply, lost)
            except KVStoreError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("events of %s: %s", service.name, error)
        subscriber.close()

    def _naming(self, context: Context) -> Naming:
        """Return the store's naming if it has blocks of this context, else one of a namespace of its own. Raises
        InvalidArgument: a text is too long."""
        if self._store is not None and self._store.has(context):
            return self._store.naming
        return NamespaceNaming(
            Namespace(model=context.model, adapter=context.adapter, salt=context.salt, dtype=DTYPE, block_tokens=context.block_tokens)
        )
