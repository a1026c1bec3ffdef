"""Reports which weights an engine uses to the master's table (docs/operations.md, Weight versions).

The master evicts blocks of older versions first once no live engine uses them. An engine never waits for a report, and a store that cannot
be reached changes nothing for it.
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
"""Between reports, until the master says otherwise."""
FIRST_RETRY_S: Final = 0.25
MAX_DOUBLINGS: Final = 6
"""A report that failed is tried again after half a second, then after twice as long each time, up to the interval of reports."""
CLOSE_S: Final = 2.0
"""How long `close` waits for the last report."""
SALT_DIGEST_BYTES: Final = 8

log = logging.getLogger("kvstore.client")


@dataclass(frozen=True, slots=True)
class _Use:
    base: str
    version: str
    namespaces: tuple[bytes, ...]


class WeightsReporter:
    """Reports what one engine uses, in a thread of its own. Threads may share it; a forked child's reports are dropped."""

    def __init__(self, client: Client, engine: str) -> None:
        """`engine` is unique among the tenant's engines: a second one of that name takes the first one's place in the table. At most 128
        bytes. The client's masters, tenant, token and certificates are used, not its connections."""
        self._settings = client.settings
        self._engine = engine
        self._changed = threading.Condition()
        self._use: _Use | None = None
        self._is_new = False
        """What is used has not been reported yet."""
        self._is_closed = False
        self._interval_s = REPORT_S
        self._control: Control | None = None
        self._failures = 0
        """Reports that failed, one after the other."""
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def use(self, base: str, version: str = "", namespaces: Sequence[bytes] = ()) -> None:
        """Report from now on that the engine uses these weights, in place of what it used before. Never blocks, never raises.

        Args:
            base: what the weights are without changes in memory.
            version: name of weights that were changed in memory; "" for those of the files.
            namespaces: canonical forms of the namespaces of the engine's blocks (`Namespace.canonical`). Their revisions and adapters are
                what is reported where there are any. The salt is replaced by a digest before anything is sent.
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
        """Report that the engine uses nothing any more, and stop. Waits for CLOSE_S at most. Never raises; a second close is a no-op."""
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
        except RuntimeError as error:  # no thread is to be had: the next `use` tries again
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
        self._hang_up()

    def _report(self, use: _Use, *, ends: bool) -> None:
        """One report; a failure is logged when failures begin."""
        try:
            settings = replace(self._settings, deadline_s=min(self._settings.deadline_s, CLOSE_S)) if ends else self._settings
            if self._control is None:
                self._control = Control(find_control(settings), settings)
            self._interval_s = self._control.report_weights(_request(self._settings, self._engine, use, ends=ends))
        except Exception as error:  # whatever it is, it is not the engine's trouble
            self._hang_up()
            self._failed(error)
        else:
            if self._failures:
                log.info("kvstore: the master takes this engine's weights (%s) again", self._engine)
            self._failures = 0

    def _failed(self, error: Exception) -> None:
        if not self._failures:
            log.warning("kvstore: cannot report the weights of engine %s, which goes on: %s", self._engine, error)
        self._failures += 1

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def hidden(canonical: bytes) -> tuple[bytes, bytes]:
    """Return a namespace's id and its canonical form with a digest in place of the salt. Raises InvalidArgument for no canonical form."""
    namespace = Namespace.from_canonical(canonical)
    digest = blake2b(namespace.salt.encode(), digest_size=SALT_DIGEST_BYTES).hexdigest() if namespace.salt else ""
    return namespace.id, replace(namespace, salt=digest).canonical()


def _request(settings: ClientSettings, engine: str, use: _Use, *, ends: bool) -> pb.WeightsReport:
    request = pb.WeightsReport(tenant=settings.tenant, engine=engine, base=use.base, version=use.version, ends=ends)
    for canonical in dict.fromkeys(use.namespaces):
        id, form = hidden(canonical)
        request.namespaces.add(id=id, form=form)
    return request
