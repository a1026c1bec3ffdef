"""Log of whether an engine's store is reachable: a line within seconds of the start, and one at each change."""

import logging
import threading
from typing import Final, Protocol

from kvstore.protocol.errors import Denied, KVStoreError, Misuse, Untrusted, typed

DEADLINE_S: Final = 4.0
"""Deadline of a ping: an unreachable store is logged within 5 s of the engine's start."""
INTERVAL_S: Final = 10.0
"""Pause between pings."""
UNKNOWN: Final = ""
"""State before the first ping."""


class Pinged(Protocol):
    """The part of a client that is used here."""

    def ping(self, *, deadline_s: float) -> object: ...


class ReachabilityCheck:
    """Thread that pings an engine's store every `interval_s` and logs the first state and each change. Close it
    before its client."""

    def __init__(self, client: Pinged, master: str, log: logging.Logger, *, interval_s: float = INTERVAL_S) -> None:
        """Start the thread, which pings at once.

        Args:
            client: not owned.
            master: address for the log lines.
            log: a logger that the engine shows.
        """
        self._client = client
        self._master = master
        self._log = log
        self._interval_s = interval_s
        self._last_error: str | None = UNKNOWN
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-reachability", daemon=True)
        self._thread.start()

    @property
    def is_unreachable(self) -> bool:
        """True if the last ping failed; False before the first."""
        return self._last_error not in (UNKNOWN, None)

    def close(self) -> None:
        """Stop the thread after its current ping, at most DEADLINE_S. A second close is a no-op."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            error = None
            try:
                self._client.ping(deadline_s=DEADLINE_S)
            except Exception as raised:
                error = typed(raised)
            if self._closed.is_set():
                return  # the client may be closing: its error is expected
            self._note(error)
            self._closed.wait(self._interval_s)

    def _note(self, error: KVStoreError | None) -> None:
        """Log the outcome of a ping if it differs from the previous one. None: success."""
        failure = None if error is None else type(error).__name__
        if failure == self._last_error:
            return
        earlier, self._last_error = self._last_error, failure
        if error is None and earlier == UNKNOWN:
            self._log.info("kvstore: the store at %s answers", self._master)
        elif error is None:
            self._log.warning("kvstore: the store at %s answers again", self._master)
        else:
            self._log.warning(
                "kvstore: the store at %s %s: %s: %s. The engine goes on without it", self._master, _remedy(error), failure, error
            )


def _remedy(error: KVStoreError) -> str:
    if isinstance(error, Untrusted):
        return "is not trusted, or does not trust this engine (set `tls_ca`, `tls_cert` and `tls_key`)"
    if isinstance(error, Denied):
        return "refuses this engine (set `tenant` and `token`)"
    if isinstance(error, Misuse):
        return "cannot be used (check the settings)"
    return "cannot be reached (start it, or set `master`, and `tls_ca` if it needs TLS)"
