"""Reports of one engine to the scheduler: its load, and what has changed in its own memory, as often as the master asks for them.

An engine that sleeps, or whose metrics do not arrive, leaves the scheduler at once, so that no request is sent to it, and joins again when
it is back. Sleep clears an engine's cache, and vLLM publishes that with the next step after it woke up: what it had is void at once. A
restarted engine publishes nothing about what it lost: its start time shows it, and the replay of its events what it has since.
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
"""Pause after an engine or a master that does not answer."""
SEEN_AFTER_S: Final = 1.0
"""A request counts as part of the engine's own figures this long after it was sent: vLLM updates its metrics with each step."""
MAX_WAIT_S: Final = 0.2
"""For events, at a time: whether to end is looked at in between."""

log = logging.getLogger("kvstore.sidecar")


class InstanceReporting:
    """Of one thread; what it is given is closed by whoever made it."""

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
        """`blocks` and `subscriber` go together; None: what the engine has is not told. `on_first`: once the master has heard of it.
        Some of the reports are traced, by chance, as `tracing` says."""
        self._settings = settings
        self._client = client
        self._blocks = blocks
        self._subscriber = subscriber
        self._on_first = on_first
        self._tracing = tracing
        self.is_in = False
        """The scheduler knows the engine."""
        self.reports = self.failures = 0
        """Reports that the master took; metrics of the engine that could not be had, and reports that were not taken."""
        self.told_s = time.monotonic()
        """When it last came round."""
        self._load: EngineLoad | None = None
        """As last read; None: not read yet."""
        self._is_ending = False
        self._complaint = ""

    @property
    def name(self) -> str:
        return self._settings.name or self._settings.engine

    def run(self) -> None:
        """Tell until `stop`, then leave."""
        while not self._is_ending:
            self._listen(self._told())
        self._leave()

    def stop(self) -> None:
        """Have `run` end within the time of a question. For signal handlers too: takes no lock."""
        self._is_ending = True

    def _told(self) -> float:
        """As `_tell`, in a trace where chance has it."""
        if self._tracing is None or not self._tracing.samples():
            return self._tell()
        with self._tracing.begin_call("sidecar.report") as recorded:
            failures = self.failures
            wait_s = self._tell()
            recorded.span.set_attribute("kvstore.failures", self.failures - failures)
        return wait_s

    def _tell(self) -> float:
        """Report once: seconds until the next time."""
        self.told_s = time.monotonic()
        try:
            load = read_load(_fetch(self._settings.engine.rstrip("/") + "/metrics", self._settings.deadline_s))
        except KVStoreError as error:
            self.failures += 1
            self._complain(error)
            self._leave()
            return RETRY_INTERVAL_S
        if load.is_asleep:
            self._fall_asleep()
            return RETRY_INTERVAL_S
        self._notice_restart(load)
        try:
            heard = self._client.report(self._report(load))
        except KVStoreError as error:
            self.failures += 1
            self._complain(error)
            return RETRY_INTERVAL_S
        self.reports += 1
        if self._blocks is not None:
            self._blocks.heard(heard.engine_cache_version)
        self._complaint = ""
        if not self.is_in:
            self.is_in = True
            log.info("engine %s reports to the scheduler", self.name)
            self._on_first()
        return heard.interval_s

    def _fall_asleep(self) -> None:
        if self.is_in:
            log.info("engine %s sleeps: it gets no requests until it is woken up", self.name)
        if self._blocks is not None:
            self._blocks.clear()
        self._leave()

    def _notice_restart(self, load: EngineLoad) -> None:
        """Have the events of an engine that is new, or was restarted, replayed: before the scheduler gets to know of it."""
        before, self._load = self._load, load
        if self._subscriber is None or self._blocks is None or (before is not None and not load.is_restarted_since(before)):
            return
        try:
            self._subscriber.catch_up(self._apply, self._blocks.clear)
        except KVStoreError as error:
            self._complain(error)

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

    def _listen(self, seconds: float) -> None:
        """Take events for so long, or until the end."""
        until_s = time.monotonic() + seconds
        while not self._is_ending and (left_s := until_s - time.monotonic()) > 0:
            self.told_s = time.monotonic()
            wait_s = min(left_s, MAX_WAIT_S)
            if self._subscriber is None or self._blocks is None:
                time.sleep(wait_s)
                continue
            try:
                self._subscriber.take(wait_s, self._apply, self._blocks.clear)
            except KVStoreError as error:
                self._complain(error)

    def _apply(self, events: list[Event]) -> None:
        assert self._blocks is not None, "events are taken for blocks"
        self._blocks.apply(events)

    def _leave(self) -> None:
        if not self.is_in:
            return
        self.is_in = False
        try:
            self._client.leave(self.name)
        except KVStoreError as error:  # it forgets by itself who is silent
            log.warning("engine %s could not leave the scheduler: %s", self.name, error)

    def _complain(self, error: KVStoreError) -> None:
        """Each complaint once, until all is well."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.warning("engine %s: %s", self.name, error)


def _fetch(url: str, timeout_s: float) -> str:
    """Raises Unavailable."""
    until_s, text = time.monotonic() + timeout_s, bytearray()
    try:
        request = urllib.request.Request(url, headers=dict(trace_metadata()))
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # its timeout is anew that of each piece
            while len(text) < MAX_METRICS_BYTES and (piece := response.read1(MAX_METRICS_BYTES - len(text))):
                text += piece
                if time.monotonic() > until_s:
                    raise TimeoutError(f"not all of them came within {timeout_s:g} s")
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        raise Unavailable(f"its metrics at {url} cannot be had: {error}") from None
    return text.decode(errors="replace")
