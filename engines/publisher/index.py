"""Index of blocks that other routers query: what registered engines hold, and what all of them reach in the store.

A thread subscribes to the events of each registered engine; one lock guards the table that all of them fill.

An engine whose replay endpoint does not answer has nothing: a router must not prefer it for what it had before it died. Without a replay
endpoint an engine that died keeps its blocks until it is unregistered, or publishes again.

Media in which a store has the blocks of a prompt: memory of a node counts as `cpu`, NVMe as `disk`.
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
from kvstore.kvcache.namespace import Namespace
from kvstore.kvcache.naming import NamespaceNaming, Naming
from kvstore.protocol.errors import KVStoreError

WAIT_S: Final = 0.2
"""For events, at a time: whether to end is looked at in between."""
VERIFY_S: Final = 10.0
"""How often a publisher is asked for what came after the last batch that was taken."""
REPLAY_TIMEOUT_S: Final = 5.0
JOIN_S: Final = 10.0
DEADLINE_S: Final = 1.0
"""For one question to the store; Mooncake's clients wait as long for an answer to theirs."""
NVME: Final = "nvme"
DTYPE: Final = "bfloat16"
"""Of namespaces that name blocks in the table only: keys of theirs are not in the store."""

log = logging.getLogger("kvstore.publisher")


class StoreMedia:
    """Threads may share it. The client is closed by its owner."""

    def __init__(self, client: Client, naming: Naming, *, model: str) -> None:
        """`model`: the name by which routers ask for the model of `naming`."""
        self._client = client
        self._model = model
        self.naming = naming
        self._is_silent = False

    def has(self, context: Context) -> bool:
        """Whether the store's blocks are of this context: of its model and block size, without an adapter or a salt."""
        return (context.model, context.block_tokens, context.adapter, context.salt) == (self._model, self.naming.block_tokens, "", "")

    def media(self, keys: Sequence[bytes]) -> list[str]:
        """`cpu` or `disk` for each block that can be read, "" for the others; [] where the store does not answer in time."""
        try:
            found = self._client.locate(keys, deadline_s=DEADLINE_S) if keys else []
        except KVStoreError as error:
            if not self._is_silent:
                log.warning("routers are told of no block of the store: %s", error)
            self._is_silent = True
            return []
        self._is_silent = False
        return [_medium({tier for replica in replicas for tier in replica.tiers}) for replicas in found]


def _medium(tiers: set[str]) -> str:
    if tiers - {NVME}:
        return CPU
    return DISK if tiers else ""


class EngineBlockIndex:
    """Threads may share it. Close it."""

    def __init__(self, store: StoreMedia | None, *, verify_s: float = VERIFY_S, replay_timeout_s: float = REPLAY_TIMEOUT_S) -> None:
        """`store`: whose blocks every instance reaches; None: routers are told of engines only."""
        self._store = store
        self._table = PrefixTable(self._naming)
        self._lock = threading.Lock()
        """Held for each use of the table."""
        self._verify_s = verify_s
        self._replay_timeout_s = replay_timeout_s
        self._threads: dict[str, tuple[threading.Event, threading.Thread]] = {}

    @property
    def services(self) -> int:
        """How many are registered."""
        with self._lock:
            return len(self._table.services)

    def tokens_of(self, key: bytes) -> list[int] | None:
        """Token ids of a block of the store, if a registered engine published them lately."""
        with self._lock:
            return self._table.tokens_of(key)

    def match(self, context: Context, token_ids: list[int], *, instance: str | None = None) -> dict[str, InstanceMatch]:
        """Return what each instance of the context has of a prompt; `instance`: that one alone. Raises InvalidArgument."""
        keys = self._naming(context).block_keys(token_ids)
        in_store = self._store.media(keys) if self._store is not None and self._store.has(context) else []
        with self._lock:
            return self._table.match(context, keys, instance=instance, in_store=in_store)

    def add(self, service: Service) -> None:
        """Follow the events of a service, unless that is done already. Raises InvalidArgument, also for a malformed endpoint; Full."""
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
        """The service that is not followed any more; None: there is none of this name. Its thread ends by itself."""
        with self._lock:
            service = self._table.remove(name)
            if service is not None:
                self._threads.pop(name)[0].set()
        return service

    def close(self) -> None:
        """Within JOIN_S: a thread that waits for a replay is left behind."""
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
        """The store's own where it has blocks of this context. Raises InvalidArgument for texts that are too long."""
        if self._store is not None and self._store.has(context):
            return self._store.naming
        return NamespaceNaming(
            Namespace(model=context.model, adapter=context.adapter, salt=context.salt, dtype=DTYPE, block_tokens=context.block_tokens)
        )
