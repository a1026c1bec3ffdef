"""Reports of one engine to the scheduler, at the master's interval: its load and the changes of its own cache.

- **Unreachable or asleep.** An engine that sleeps, or whose metrics do not arrive, is withdrawn from the scheduler at
  once, so it gets no requests. It joins again when it is back.
- **Sleep** clears an engine's cache, but vLLM publishes that only in the first step after waking. Its blocks are
  dropped at once.
- **Restart.** A restarted engine publishes no removals. Its start time shows the restart, and a replay of its events
  has its current blocks.
"""

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import TYPE_CHECKING, Final

from kvstore.client.instances.client import InstanceReport, InstanceRole, SchedulerClient
from kvstore.engines.kv_events.events import Event
from kvstore.engines.kv_events.subscriber import Subscriber
from kvstore.engines.sidecar.blocks import EngineBlocks
from kvstore.engines.sidecar.config import SidecarSettings
from kvstore.engines.sidecar.load import EngineLoad, read_load
from kvstore.protocol.errors import KVStoreError, Unavailable
from kvstore.rpc.tracing import trace_metadata

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing


ROLES: Final = {"both": InstanceRole.BOTH, "prefill": InstanceRole.PREFILL, "decode": InstanceRole.DECODE}
MAX_METRICS_BYTES: Final = 16 << 20
RETRY_INTERVAL_S: Final = 1.0
"""Pause after an engine or a master did not respond."""
SEEN_AFTER_S: Final = 1.0
"""A request is part of the engine's own metrics this long after it was sent: vLLM updates them with each step."""
MAX_WAIT_S: Final = 0.2
"""Maximum wait for events before `run` checks whether to stop."""

log = logging.getLogger("kvstore.sidecar")


class InstanceReporting:
    """Reporter of one engine. One thread calls `run`; `stop` is safe in signal handlers. It owns none of its
    arguments."""

    def __init__(
        self,
        settings: SidecarSettings,
        client: SchedulerClient,
        blocks: EngineBlocks | None,
        subscriber: Subscriber | None,
        *,
        on_first: Callable[[], None],
        tracing: "Tracing | None" = None,
    ) -> None:
        """Create a reporter, which sends nothing before `run`.

        Args:
            blocks: the engine's blocks; None, with `subscriber`: they are not reported.
            on_first: called after the master accepted a report for the first time, and again after each return.
            tracing: samples reports for traces.
        """
        self._settings = settings
        self._client = client
        self._blocks = blocks
        self._subscriber = subscriber
        self._on_first = on_first
        self._tracing = tracing
        self.is_registered = False
        """True if the engine is registered with the scheduler."""
        self.reports = self.failures = 0
        """`reports`: accepted by the master. `failures`: metrics that could not be read, and reports that were not
        accepted."""
        self.last_round_s = time.monotonic()
        """Time of the last round, by time.monotonic."""
        self._load: EngineLoad | None = None
        """Last load that was read."""
        self._is_ending = False
        self._last_error = ""

    @property
    def name(self) -> str:
        return self._settings.name or self._settings.engine

    def run(self) -> None:
        """Report until `stop`, then leave the scheduler."""
        while not self._is_ending:
            self._take_events(self._report_traced())
        self._leave()

    def stop(self) -> None:
        """Make `run` return within one deadline. Takes no lock, so signal handlers may call it."""
        self._is_ending = True

    def _report_traced(self) -> float:
        """Report once, within a trace if it is sampled."""
        if self._tracing is None or not self._tracing.samples():
            return self._report_once()
        with self._tracing.begin_call("sidecar.report") as recorded:
            failures = self.failures
            wait_s = self._report_once()
            recorded.span.set_attribute("kvstore.failures", self.failures - failures)
        return wait_s

    def _report_once(self) -> float:
        """Report once; return the seconds until the next report."""
        self.last_round_s = time.monotonic()
        try:
            load = read_load(_fetch(self._settings.engine.rstrip("/") + "/metrics", self._settings.deadline_s))
        except KVStoreError as error:
            self.failures += 1
            self._log_once(error)
            self._leave()
            return RETRY_INTERVAL_S
        if load.is_asleep:
            self._fall_asleep()
            return RETRY_INTERVAL_S
        self._notice_restart(load)
        try:
            acknowledged = self._client.report(self._report(load))
        except KVStoreError as error:
            self.failures += 1
            self._log_once(error)
            return RETRY_INTERVAL_S
        self.reports += 1
        if self._blocks is not None:
            self._blocks.acknowledged(acknowledged.engine_cache_version)
        self._last_error = ""
        if not self.is_registered:
            self.is_registered = True
            log.info("engine %s reports to the scheduler", self.name)
            self._on_first()
        return acknowledged.interval_s

    def _fall_asleep(self) -> None:
        if self.is_registered:
            log.info("engine %s sleeps: it gets no requests until it wakes up", self.name)
        if self._blocks is not None:
            self._blocks.clear()
        self._leave()

    def _notice_restart(self, load: EngineLoad) -> None:
        """Replay the events of a new or restarted engine, before the scheduler sees it."""
        before, self._load = self._load, load
        if self._subscriber is None or self._blocks is None or (before is not None and not load.is_restarted_since(before)):
            return
        try:
            self._subscriber.catch_up(self._apply, self._blocks.clear)
        except KVStoreError as error:
            self._log_once(error)

    def _report(self, load: EngineLoad) -> InstanceReport:
        settings = self._settings
        return InstanceReport(
            name=self.name,
            role=ROLES[settings.role],
            address=settings.advertise or settings.engine,
            node=settings.node,
            queue_s=load.queue_s,
            batch=load.running + load.waiting,
            context_tokens=load.expected_tokens,
            capacity_tokens=load.capacity_tokens,
            seen_after_s=SEEN_AFTER_S,
            engine_cache=None if self._blocks is None else self._blocks.change(),
        )

    def _take_events(self, seconds: float) -> None:
        """Apply events for `seconds`, or until `stop`."""
        until_s = time.monotonic() + seconds
        while not self._is_ending and (left_s := until_s - time.monotonic()) > 0:
            self.last_round_s = time.monotonic()
            wait_s = min(left_s, MAX_WAIT_S)
            if self._subscriber is None or self._blocks is None:
                time.sleep(wait_s)
                continue
            try:
                self._subscriber.take(wait_s, self._apply, self._blocks.clear)
            except KVStoreError as error:
                self._log_once(error)

    def _apply(self, events: list[Event]) -> None:
        assert self._blocks is not None, "events are taken for blocks"
        self._blocks.apply(events)

    def _leave(self) -> None:
        if not self.is_registered:
            return
        self.is_registered = False
        try:
            self._client.leave(self.name)
        except KVStoreError as error:  # the scheduler drops silent engines after a timeout
            log.warning("engine %s could not leave the scheduler: %s", self.name, error)

    def _log_once(self, error: KVStoreError) -> None:
        """Log an error unless it repeats the last one."""
        if str(error) != self._last_error:
            self._last_error = str(error)
            log.warning("engine %s: %s", self.name, error)


def _fetch(url: str, timeout_s: float) -> str:
    """Return the text at `url`. Raises Unavailable."""
    until_s, text = time.monotonic() + timeout_s, bytearray()
    try:
        request = urllib.request.Request(url, headers=dict(trace_metadata()))
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # its timeout applies to each read
            while len(text) < MAX_METRICS_BYTES and (piece := response.read1(MAX_METRICS_BYTES - len(text))):
                text += piece
                if time.monotonic() > until_s:
                    raise TimeoutError(f"incomplete after {timeout_s:g} s")
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        raise Unavailable(f"cannot read its metrics at {url}: {error}") from None
    return text.decode(errors="replace")
