"""Keeps the master informed of one instance: a thread that reports every interval, whatever becomes of the master.

It does not know what the instance does: the state comes from a function, and what happened in between from `saw`, `prefilled`, `decoded`.
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
"""Between reports that do not come through."""
MAX_SEEN: Final = 65_536
"""Requests named in one report, the latest; the master takes no more."""
MAX_SAMPLES: Final = 256
"""Samples of each kind in one report, the latest; the master takes no more."""
MAX_REQUEST_ID: Final = (1 << 64) - 1

log = logging.getLogger("kvstore.client")


@dataclass(slots=True)
class _PendingChanges:
    """What happened since the last report."""

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
    """A context manager: the instance is in the master's list inside, from the first report that comes through, and gone afterwards.

    A master that is away is looked for until it is back, and told then what it has missed. What it refuses as such is logged and not told
    again. Threads may share it. One that nobody has any more, for a signal handler raised as it was made, say, makes no further report.
    """

    def __init__(
        self,
        client: SchedulerClient,
        state: Callable[[], InstanceReport],
        *,
        on_heard: Callable[[InstanceReportReply], None] = lambda heard: None,
    ) -> None:
        """Starts the thread, which calls `state` for each report; seen requests and samples in it are replaced. It must not raise.

        `on_heard` is called in that thread with the master's answer, and must not raise either. `client` is the caller's, and has to be
        open until this is closed.
        """
        self._client = client
        self._state = state
        self._on_heard = on_heard
        self._lock = threading.Lock()
        self._news = _PendingChanges()
        self._unheard = _PendingChanges()
        self._name = ""
        self._complaint = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), self._ending), name="reporter", daemon=True)
        with Shield():  # a handler that raises within a thread's start, or an event's `set`, leaves a lock taken that the thread needs
            self._thread.start()

    def saw(self, request_id: int) -> None:
        """This request has come in. Call it when `state` counts it: the master stops counting it by itself. Raises InvalidArgument for
        what is no number of a request."""
        if not isinstance(request_id, int) or not 0 <= request_id <= MAX_REQUEST_ID:
            raise InvalidArgument(f"the id of a request is a whole number from 0 to 2**64 - 1, not {request_id!r}")
        with self._lock:
            self._news.seen.append(request_id)

    def prefilled(self, *, input_tokens: int, prefix_tokens: int, duration_s: float) -> None:
        """A prefill took so long, alone. Raises InvalidArgument for what cannot have been measured."""
        sample = PrefillSample(input_tokens, prefix_tokens, duration_s)
        with self._lock:
            self._news.prefills.append(sample)

    def decoded(self, *, batch: int, context_tokens: int, duration_s: float) -> None:
        """A step of decoding took so long. Raises InvalidArgument for what cannot have been measured."""
        sample = DecodeSample(batch, context_tokens, duration_s)
        with self._lock:
            self._news.decodes.append(sample)

    def close(self) -> None:
        """Leave and end the thread, within the client's `deadline_s`. A second close is a no-op."""
        if self._ending.is_set():
            return
        deadline = Deadline(self._client.settings.deadline_s)
        with Shield():
            self._ending.set()
        self._thread.join(deadline.timeout_s)
        # A report that is still under way would bring the instance back, and a master that is away has forgotten it already.
        if self._name and not self._thread.is_alive():
            with contextlib.suppress(KVStoreError):
                self._client.leave(self._name, deadline=deadline)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _report(self) -> float:
        """Report once: seconds until the next time."""
        # Taken before the state: what happens in between is in the state already, and named in the next report.
        with self._lock:
            news, self._news = self._news.after(self._unheard), _PendingChanges()
        report = replace(self._state(), seen_request_ids=news.seen, prefill_samples=news.prefills, decode_samples=news.decodes)
        self._name = report.name
        try:
            heard = self._client.report(report)
        except KVStoreError as error:
            # What it refuses it would refuse again, and whatever comes after it.
            self._unheard = _PendingChanges() if isinstance(error, InvalidArgument) else news
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("instance %s cannot report, and tries again each %g s: %s", report.name, RETRY_INTERVAL_S, error)
            return RETRY_INTERVAL_S
        self._unheard = _PendingChanges()
        if self._complaint:
            self._complaint = ""
            log.warning("instance %s reports again", report.name)
        self._on_heard(heard)
        return heard.interval_s


def _run(own: "weakref.ref[Reporter]", ending: threading.Event) -> None:
    """The thread: report until it is to end, or nobody has the reporter any more."""
    pause_s = 0.0
    while not ending.wait(pause_s):
        reporter = own()
        if reporter is None:
            return
        pause_s = reporter._report()
        del reporter
