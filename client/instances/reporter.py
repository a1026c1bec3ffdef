"""Reports one instance to the master periodically, in a thread that survives failures of the master.

The state comes from a callback; events in between come from `saw`, `prefilled` and `decoded`.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final

from kvstore.client.instances.client import InstanceReport, InstanceReportReply, SchedulerClient
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.rpc.deadline import Deadline
from kvstore.scheduler.estimators.regression import DecodeSample, PrefillSample
from kvstore.transfer.memory.signal_safety import Shield

RETRY_INTERVAL_S: Final = 1.0
"""Interval after a failed report."""
MAX_SEEN: Final = 65_536
"""Requests in one report, the latest; the master's limit."""
MAX_SAMPLES: Final = 256
"""Samples of each kind in one report, the latest; the master's limit."""
MAX_REQUEST_ID: Final = (1 << 64) - 1

log = logging.getLogger("kvstore.client")


@dataclass(slots=True)
class _PendingChanges:
    """Events since the last report."""

    seen: list[int] = field(default_factory=list)
    prefills: list[PrefillSample] = field(default_factory=list)
    decodes: list[DecodeSample] = field(default_factory=list)

    def after(self, earlier: "_PendingChanges") -> "_PendingChanges":
        """Both, within the limits."""
        return _PendingChanges(
            (earlier.seen + self.seen)[-MAX_SEEN:],
            (earlier.prefills + self.prefills)[-MAX_SAMPLES:],
            (earlier.decodes + self.decodes)[-MAX_SAMPLES:],
        )


class Reporter:
    """Reports one instance while open. A context manager; thread-safe.

    The instance is registered by the first successful report and removed by `close`. While the master is unreachable,
    reports are retried and keep their events; a report that the master refuses is logged and dropped. A Reporter that
    is garbage collected stops reporting.
    """

    def __init__(
        self,
        client: SchedulerClient,
        state: Callable[[], InstanceReport],
        *,
        on_reply: Callable[[InstanceReportReply], None] = lambda reply: None,
    ) -> None:
        """Start the thread. It calls `state` for each report, whose seen requests and samples are replaced; `state`
        must not raise.

        `on_reply` is called in that thread with the master's reply, and must not raise either. `client` is the
        caller's, and must stay open until this is closed.
        """
        self._client = client
        self._state = state
        self._on_reply = on_reply
        self._lock = threading.Lock()
        self._pending = _PendingChanges()
        self._unsent = _PendingChanges()
        self._name = ""
        self._last_error = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), self._stopping), name="reporter", daemon=True)
        with Shield():  # a signal handler that raises within Thread.start or Event.set would leave a lock held
            self._thread.start()

    def saw(self, request_id: int) -> None:
        """Record a request that has arrived. Call it once `state` counts the request, because the master stops counting
        it.

        Raises InvalidArgument for an id out of range.
        """
        if not isinstance(request_id, int) or not 0 <= request_id <= MAX_REQUEST_ID:
            raise InvalidArgument(f"the id of a request is a whole number from 0 to 2**64 - 1, not {request_id!r}")
        with self._lock:
            self._pending.seen.append(request_id)

    def prefilled(self, *, input_tokens: int, prefix_tokens: int, duration_s: float) -> None:
        """Record the duration of a prefill that ran alone. Raises InvalidArgument for impossible values."""
        sample = PrefillSample(input_tokens, prefix_tokens, duration_s)
        with self._lock:
            self._pending.prefills.append(sample)

    def decoded(self, *, batch: int, context_tokens: int, duration_s: float) -> None:
        """Record the duration of a decode step. Raises InvalidArgument for impossible values."""
        sample = DecodeSample(batch, context_tokens, duration_s)
        with self._lock:
            self._pending.decodes.append(sample)

    def close(self) -> None:
        """Remove the instance and end the thread, within the client's `deadline_s`. A second close is a no-op."""
        if self._stopping.is_set():
            return
        deadline = Deadline(self._client.settings.deadline_s)
        with Shield():
            self._stopping.set()
        self._thread.join(deadline.timeout_s)
        # A report in progress would register the instance again; an unreachable master expires it.
        if self._name and not self._thread.is_alive():
            with contextlib.suppress(KVStoreError):
                self._client.leave(self._name, deadline=deadline)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _report(self) -> float:
        """Report once: seconds until the next report."""
        # Taken before the state: an event in between is in the state already, and named in the next report.
        with self._lock:
            pending, self._pending = self._pending.after(self._unsent), _PendingChanges()
        report = replace(self._state(), seen_request_ids=pending.seen, prefill_samples=pending.prefills, decode_samples=pending.decodes)
        self._name = report.name
        try:
            reply = self._client.report(report)
        except KVStoreError as error:
            # A refused report would be refused again: drop its events.
            self._unsent = _PendingChanges() if isinstance(error, InvalidArgument) else pending
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("the report of instance %s failed, retrying every %g s: %s", report.name, RETRY_INTERVAL_S, error)
            return RETRY_INTERVAL_S
        self._unsent = _PendingChanges()
        if self._last_error:
            self._last_error = ""
            log.warning("instance %s reports again", report.name)
        self._on_reply(reply)
        return reply.interval_s


def _run(own: "weakref.ref[Reporter]", stopping: threading.Event) -> None:
    """Thread: report until stopped, or until the Reporter is collected."""
    pause_s = 0.0
    while not stopping.wait(pause_s):
        reporter = own()
        if reporter is None:
            return
        pause_s = reporter._report()
        del reporter
