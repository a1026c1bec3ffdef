"""Watch of an etcd key range: its events from a revision on, in order, until the connection breaks or the revision
is compacted."""

import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from aetcd.rpc import rpc_pb2

from kvstore.master.catalogs.etcd.channel import EtcdChannel, ReplyStream
from kvstore.protocol.errors import CatalogUnavailable

PROGRESS_INTERVAL_S: Final = 0.5
"""Interval of progress requests. Without them a hung member looks like an idle one."""
SILENCE_LIMIT_S: Final = 3.0
"""A watch without a response for this long is cancelled, and the next endpoint used."""


class CompactedError(Exception):
    """The watch's first revision is compacted away: all values must be listed again."""


class WatchEvents(NamedTuple):
    """Events of complete revisions; if not `is_whole`, the rest of the last one follows. `revision` is the newest
    one's.

    An empty list is a sign of life, without a revision: etcd before 3.4.25 and 3.5.8 reports revisions whose events
    are still to be sent."""

    events: list[Any]
    revision: int
    is_whole: bool


ALIVE: Final = WatchEvents([], 0, is_whole=False)


class EtcdWatch:
    """One watch of the keys [begin, end). One thread iterates; another may `cancel`."""

    def __init__(self, channel: EtcdChannel, begin: bytes, end: bytes, *, timeout_s: float) -> None:
        self._channel = channel
        self._range = (begin, end)
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._stream: ReplyStream | None = None
        self._heard_s = 0.0

    def events(self, first_revision: int) -> Iterator[WatchEvents]:
        """Start the watch and yield its events. Raises CompactedError, CatalogUnavailable, ConfigError."""
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
        """Yield the requests, in a thread of gRPC's, which also enforces SILENCE_LIMIT_S."""
        create = rpc_pb2.WatchCreateRequest(key=self._range[0], range_end=self._range[1], start_revision=first_revision, fragment=True)
        yield rpc_pb2.WatchRequest(create_request=create)
        while not self._over.wait(PROGRESS_INTERVAL_S):
            if time.monotonic() - self._heard_s > SILENCE_LIMIT_S:
                self.cancel()
                return
            yield rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())
