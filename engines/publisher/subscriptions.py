"""Subscriptions to the events of registered engines: a thread each, and one lock for the table that all of them fill.

An engine whose replay endpoint does not answer has nothing: a router must not prefer it for what it had before it died. Without a replay
endpoint an engine that died keeps its blocks until it is unregistered, or publishes again.
"""

import logging
import threading
import time
from typing import Final

from kvstore.engines.kv_events.events import Event
from kvstore.engines.kv_events.subscriber import Subscriber
from kvstore.engines.publisher.prefix_table import PrefixTable, Service
from kvstore.protocol.errors import KVStoreError

WAIT_S: Final = 0.2
"""For events, at a time: whether to end is looked at in between."""
VERIFY_S: Final = 10.0
"""How often a publisher is asked for what came after the last batch that was taken."""
REPLAY_TIMEOUT_S: Final = 5.0
JOIN_S: Final = 10.0

log = logging.getLogger("kvstore.publisher")


class Subscriptions:
    """Threads may share it. Close it."""

    def __init__(self, table: PrefixTable, *, verify_s: float = VERIFY_S, replay_timeout_s: float = REPLAY_TIMEOUT_S) -> None:
        self.lock = threading.Lock()
        """Held for each use of the table."""
        self.table = table
        self._verify_s = verify_s
        self._replay_timeout_s = replay_timeout_s
        self._threads: dict[str, tuple[threading.Event, threading.Thread]] = {}

    def add(self, service: Service) -> None:
        """Follow the events of a service, unless that is done already. Raises InvalidArgument, also for a malformed endpoint; Full."""
        subscriber = Subscriber(service.endpoint, service.replay_endpoint, replay_timeout_s=self._replay_timeout_s)
        with self.lock:
            try:
                is_new = self.table.add(service)
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
        with self.lock:
            service = self.table.remove(name)
            if service is not None:
                self._threads.pop(name)[0].set()
        return service

    def close(self) -> None:
        """Within JOIN_S: a thread that waits for a replay is left behind."""
        with self.lock:
            threads = list(self._threads.values())
        for ending, _ in threads:
            ending.set()
        until_s = time.monotonic() + JOIN_S
        for _, thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _follow(self, service: Service, subscriber: Subscriber, ending: threading.Event) -> None:
        def apply(events: list[Event]) -> None:
            with self.lock:
                self.table.apply(service, events)

        def lost() -> None:
            with self.lock:
                self.table.clear(service)

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
