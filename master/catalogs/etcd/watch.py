"""What happened under a prefix of etcd's keys, from a revision on, in order, until the connection breaks or etcd has forgotten it."""

import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdChannel, ReplyStream
from kvstore.protocol.errors import CatalogUnavailable

PROGRESS_INTERVAL_S: Final = 0.5
"""How often etcd is asked for a sign of life: a member that hangs says nothing, as one where nothing happens."""
SILENCE_LIMIT_S: Final = 3.0
"""What says nothing for as long as this is given up, and the next endpoint asked."""


class CompactedError(Exception):
    """What was to be watched from is compacted away: all must be read anew."""


class WatchEvents(NamedTuple):
    """Events of whole revisions, but for the last one if not `is_whole`: its rest follows. `revision`: of the newest. None at all are a
    sign of life, which says nothing of revisions: etcd before 3.4.25 and 3.5.8 names some whose events are still to come."""

    events: list[Any]
    revision: int
    is_whole: bool


ALIVE: Final = WatchEvents([], 0, is_whole=False)


class EtcdWatch:
    """One watch. A thread iterates, another may `cancel`."""

    def __init__(self, channel: EtcdChannel, begin: bytes, end: bytes, *, timeout_s: float) -> None:
        """Of the keys [begin, end). Nothing is asked for yet."""
        self._channel = channel
        self._range = (begin, end)
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._stream: ReplyStream | None = None
        self._heard_s = 0.0

    def events(self, first_revision: int) -> Iterator[WatchEvents]:
        """Raises CompactedError, CatalogUnavailable, ConfigError."""
        self._heard_s = time.monotonic()
        self._stream = self._channel.stream("Watch", self._requests(first_revision), connect_timeout_s=self._timeout_s)
        try:
            for answer in self._stream:
                self._heard_s = time.monotonic()
                if answer.compact_revision:
                    raise CompactedError(f"etcd: revision {first_revision} is compacted away")
                if answer.canceled:
                    raise CatalogUnavailable(f"etcd: the watch was cancelled: {answer.cancel_reason}")
                if answer.events:
                    yield WatchEvents(list(answer.events), answer.events[-1].kv.mod_revision, not answer.fragment)
                elif not answer.created:
                    yield ALIVE
        finally:
            self.cancel()
        raise CatalogUnavailable("etcd: the watch has ended")

    def cancel(self) -> None:
        self._over.set()
        if self._stream is not None:
            self._stream.cancel()

    def _requests(self, first_revision: int) -> Iterator[Any]:
        """In a thread of gRPC's, which so keeps the time, too."""
        create = rpc_pb2.WatchCreateRequest(key=self._range[0], range_end=self._range[1], start_revision=first_revision, fragment=True)
        yield rpc_pb2.WatchRequest(create_request=create)
        while not self._over.wait(PROGRESS_INTERVAL_S):
            if time.monotonic() - self._heard_s > SILENCE_LIMIT_S:
                self.cancel()
                return
            yield rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())
