"""Carries the audit entries of a master that does not own partition 0 to the master that does. A thread of its own, since calls block."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvstore.master.fellows import Fellows
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Closed, KVStoreError

INTERVAL_S: Final = 0.5
CALL_S: Final = 5.0
"""Deadline of one call."""
MAX_SENT: Final = 256
"""Entries of one message; with texts of 512 bytes it stays below gRPC's 4 MiB."""

log = logging.getLogger("kvstore.audit")


class Parcel(NamedTuple):
    """Entries for the master whose frames are at `address`."""

    address: str
    entries: Sequence[pb.AuditEntry]


class Forwarder:
    """See the module. `start` and `close` are for the master's thread."""

    def __init__(self, fellows: Fellows, take: Callable[[], Parcel | None], put_back: Callable[[Sequence[pb.AuditEntry]], None]) -> None:
        """`take` returns what waits and its receiver, None for nothing; `put_back` keeps what did not arrive. Both run in this thread."""
        self._fellows = fellows
        self._take = take
        self._put_back = put_back
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit-forwarder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send no more. Does not wait: the thread may wait for the loop."""
        self._is_closed.set()

    def _run(self) -> None:
        was_reached = True
        while not self._is_closed.wait(INTERVAL_S):
            try:
                parcel = self._take()
            except KVStoreError:  # the loop is busy or ends
                continue
            if parcel is None:
                continue
            unsent = self._send(parcel)
            if unsent and was_reached:
                log.warning("%d audit entries wait for the owner of the catalog, at %s", len(unsent), parcel.address)
            was_reached = not unsent

    def _send(self, parcel: Parcel) -> Sequence[pb.AuditEntry]:
        """What did not arrive; it is put back."""
        for begin in range(0, len(parcel.entries), MAX_SENT):
            message = pb.AuditEntries(entries=parcel.entries[begin : begin + MAX_SENT])
            try:
                self._fellows.ask(parcel.address, "RecordAudit", message, timeout_s=CALL_S)
            except KVStoreError:
                unsent = parcel.entries[begin:]
                try:
                    self._put_back(unsent)
                except Closed:
                    log.warning("%d audit entries are in this log only: the master stops", len(unsent))
                return unsent
        return ()
