"""Reports the weights that an engine uses to the master's table (docs/operations.md, Weight versions).

The master evicts blocks of older versions first once no live engine uses them. Reports never block the engine, and an
unreachable store has no effect on it.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, find_control
from kvstore.client.sync import Client
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol import control_pb2 as pb

REPORT_S: Final = 10.0
"""Interval of reports, until the master gives another."""
FIRST_RETRY_S: Final = 0.25
MAX_DOUBLINGS: Final = 6
"""A failed report is retried after half a second, then twice as long each time, up to the report interval."""
CLOSE_S: Final = 2.0
"""Longest wait of `close` for the last report."""
SALT_DIGEST_BYTES: Final = 8

log = logging.getLogger("kvstore.client")


@dataclass(frozen=True, slots=True)
class _Use:
    """Weights in use, with the namespaces of the engine's blocks."""

    base: str
    version: str
    namespaces: tuple[bytes, ...]


class WeightsReporter:
    """Reports the weights of one engine, in a thread. Thread-safe; reports of a forked child are dropped."""

    def __init__(self, client: Client, engine: str) -> None:
        """`engine` is unique within the tenant, at most 128 bytes: a second one of that name replaces the first in the
        table.

        The client's masters, tenant, token and certificates are used, not its connections.
        """
        self._settings = client.settings
        self._engine = engine
        self._changed = threading.Condition()
        self._use: _Use | None = None
        self._is_new = False
        """`_use` has not been reported yet."""
        self._is_closed = False
        self._interval_s = REPORT_S
        self._control: Control | None = None
        self._failures = 0
        """Consecutive failed reports."""
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def use(self, base: str, version: str = "", namespaces: Sequence[bytes] = ()) -> None:
        """Report that the engine uses these weights from now on. Never blocks, never raises.

        Args:
            base: the weights as loaded from files.
            version: name of weights changed in memory; "" for those of the files.
            namespaces: canonical forms of the namespaces of the engine's blocks (`Namespace.canonical`), whose revisions and adapters
                are reported if there are any. The salt is replaced by a digest before sending.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._is_closed:
                return
            self._use, self._is_new = _Use(base, version, tuple(namespaces)), True
            if self._thread is None:
                self._start()
            self._changed.notify()

    def close(self) -> None:
        """Report that the engine uses no weights, and stop. Waits for CLOSE_S at most. Never raises; a second close is
        a no-op."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="kvstore-weights", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread available: the next `use` tries again
            self._failed(error)
        else:
            self._thread = thread

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            with self._changed:
                while not (self._is_new or self._is_closed) and (left_s := due_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                use, is_over, self._is_new = self._use, self._is_closed, False
            if use is not None:
                self._report(use, ends=is_over)
            if is_over:
                break
            pause_s = min(self._interval_s, FIRST_RETRY_S * 2 ** min(self._failures, MAX_DOUBLINGS)) if self._failures else self._interval_s
            due_s = time.monotonic() + pause_s
        self._disconnect()

    def _report(self, use: _Use, *, ends: bool) -> None:
        """Send one report; the first of consecutive failures is logged."""
        try:
            settings = replace(self._settings, deadline_s=min(self._settings.deadline_s, CLOSE_S)) if ends else self._settings
            if self._control is None:
                self._control = Control(find_control(settings), settings)
            self._interval_s = self._control.report_weights(_request(self._settings, self._engine, use, ends=ends))
        except Exception as error:  # no failure may reach the engine
            self._disconnect()
            self._failed(error)
        else:
            if self._failures:
                log.info("kvstore: reports of the weights of engine %s succeed again", self._engine)
            self._failures = 0

    def _failed(self, error: Exception) -> None:
        if not self._failures:
            log.warning("kvstore: cannot report the weights of engine %s, which continues: %s", self._engine, error)
        self._failures += 1

    def _disconnect(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def hidden(canonical: bytes) -> tuple[bytes, bytes]:
    """A namespace's id, and its canonical form with a digest instead of the salt. Raises InvalidArgument for a
    malformed form."""
    namespace = Namespace.from_canonical(canonical)
    digest = blake2b(namespace.salt.encode(), digest_size=SALT_DIGEST_BYTES).hexdigest() if namespace.salt else ""
    return namespace.id, replace(namespace, salt=digest).canonical()


def _request(settings: ClientSettings, engine: str, use: _Use, *, ends: bool) -> pb.WeightsReport:
    request = pb.WeightsReport(tenant=settings.tenant, engine=engine, base=use.base, version=use.version, ends=ends)
    for canonical in dict.fromkeys(use.namespaces):
        id, form = hidden(canonical)
        request.namespaces.add(id=id, form=form)
    return request
