"""Records the block events of a tenant on all nodes of a running cluster, by polling each node for events since the
last poll.

It continues with the nodes that reply when others, or the master, fail; it reports what is missing and leaves a gap in
the recording. It writes no file: see cli/record.py. Not thread-safe.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from kvstore.client.config import ClientSettings
from kvstore.client.control import known_masters
from kvstore.kvcache.traces.event_file import READ, REMOVED, STORED, BlockEvent, LostEvents
from kvstore.protocol import event_messages
from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.event_messages import MAX_ANSWER_EVENTS, EventBatch, FetchEvents
from kvstore.protocol.master_messages import Nodes, NodeTable
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.owners import MAX_NAMED, find_owner
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates

REFRESH_S: Final = 1.0
"""Interval at which the master is asked for new and returned nodes."""
MAX_ROUNDS: Final = 64
"""Consecutive requests to one node, so that a busy node does not starve the others: 262,144 blocks."""
KINDS: Final = {event_messages.STORED: STORED, event_messages.READ: READ, event_messages.REMOVED: REMOVED}


@dataclass(slots=True)
class RecordCounts:
    """Totals of the recording. `stored`, `read`, `removed` and `lost` count blocks; other gaps have unknown size."""

    stored: int = 0
    read: int = 0
    removed: int = 0
    lost: int = 0
    """Overwritten at a node before they were fetched."""
    interruptions: int = 0
    """Times that a node's events were missed between two connections."""


@dataclass(slots=True)
class _RecorderConnection:
    """Connection to one recorded node, with the cursor of its event log."""

    name: str
    channel: Channel
    cursor: int = 0


class Recorder:
    """Recorder of block events. `report` is called with messages for the operator. A context manager."""

    def __init__(
        self,
        settings: ClientSettings,
        report: Callable[[str], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], float] = lambda: time.time() * 1000,
    ) -> None:
        """Start on all nodes that the master names. Raises InvalidArgument for a malformed address, Unavailable when no
        master replies, Unauthorized for a wrong token."""
        self._settings = settings
        self._report = report
        self._now_s = now_s
        self._wall_ms = wall_ms
        self._masters = known_masters(settings)
        self._tls = Certificates.of(settings)
        self._hello = Hello(ROLE_CLIENT, settings.tenant, settings.token, "recorder")
        self._connections: dict[str, _RecorderConnection] = {}
        """By node name: another master may assign other ids."""
        self._missing: set[str] = set()
        """Names of unreachable nodes, already reported."""
        self._is_master_unreachable = False
        self._refreshed_s = now_s()
        self.counts = RecordCounts()
        for name, tcp, ticket in self._nodes():
            self._begin(name, tcp, ticket)

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes being recorded."""
        return sorted(self._connections)

    @property
    def unreachable(self) -> list[str]:
        """The master and nodes that are unreachable now."""
        return ["the master"] * self._is_master_unreachable + [f"node {name}" for name in sorted(self._missing)]

    def poll(self) -> list[BlockEvent | LostEvents]:
        """Events since the last poll, in order per node. Errors of the cluster are not raised: they are reported, and
        leave a gap."""
        found: list[BlockEvent | LostEvents] = []
        if self._now_s() - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = self._now_s()
            found += self._refresh()
        for name, connection in list(self._connections.items()):
            try:
                self._drain(connection, found)
            except KVStoreError as error:
                connection.channel.close()
                del self._connections[name]
                self._note_missing(name, error)
        return found

    def close(self) -> None:
        """Close all connections: the nodes stop recording."""
        for connection in self._connections.values():
            connection.channel.close()
        self._connections.clear()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- which nodes ---

    def _refresh(self) -> list[BlockEvent | LostEvents]:
        """Start on new and returned nodes; their events until now are a gap."""
        try:
            nodes = self._nodes()
        except KVStoreError as error:
            if not self._is_master_unreachable:
                self._report(f"{error}; recording continues without the master")
            self._is_master_unreachable = True
            return []
        self._is_master_unreachable = False
        self._missing &= {name for name, _, _ in nodes}
        gaps: list[BlockEvent | LostEvents] = []
        for name, tcp, ticket in nodes:
            if name not in self._connections and self._begin(name, tcp, ticket):
                self._report(f"node {name} is recorded from now on")
                self.counts.interruptions += 1
                gaps.append(LostEvents(self._wall_ms(), name, self._settings.tenant, None))
        return gaps

    def _nodes(self) -> list[tuple[str, str, bytes]]:
        """(name, address, ticket) of each live node. Raises Unavailable when no owner of the catalog replies, and the
        owner's errors."""
        timeout_s = self._settings.connect_timeout_s
        deadline = Deadline(timeout_s * (len(self._masters.in_order()) + MAX_NAMED))
        channel = find_owner(self._masters, self._hello, deadline, attempt_s=timeout_s, tls=self._tls)
        try:
            table = channel.call(Nodes(), NodeTable, Deadline(timeout_s))
        finally:
            channel.close()
        return list(zip(table.names, table.tcp, table.tickets or [b""] * len(table.ids), strict=True))

    def _begin(self, name: str, tcp: str, ticket: bytes) -> bool:
        """Return whether recording of the node started; a failure is reported."""
        deadline = Deadline(self._settings.connect_timeout_s)
        channel = None
        try:
            channel = Channel.open(parse_address(tcp), replace(self._hello, token="", ticket=ticket), deadline, tls=self._tls)
            connection = _RecorderConnection(name, channel)
            connection.cursor = channel.call(FetchEvents(0), EventBatch, deadline).next_cursor
        except KVStoreError as error:
            if channel is not None:
                channel.close()
            self._note_missing(name, error)
            return False
        self._connections[name] = connection
        self._missing.discard(name)
        return True

    def _note_missing(self, name: str, error: KVStoreError) -> None:
        if name not in self._missing:
            self._report(f"node {name} is not recorded: {error}")
        self._missing.add(name)

    # --- what they saw ---

    def _drain(self, connection: _RecorderConnection, found: list[BlockEvent | LostEvents]) -> None:
        """Append the node's events until few are left. Raises any error of the node."""
        for _ in range(MAX_ROUNDS):
            batch = connection.channel.call(FetchEvents(connection.cursor), EventBatch, Deadline(self._settings.connect_timeout_s))
            if batch.lost:
                self._report(f"node {connection.name} overwrote {batch.lost} events before they were fetched")
                self.counts.lost += batch.lost
                found.append(LostEvents(self._wall_ms(), connection.name, self._settings.tenant, batch.lost))
            found += self._events(connection.name, batch)
            connection.cursor = batch.next_cursor
            if len(batch.keys) < MAX_ANSWER_EVENTS // 2:
                return

    def _events(self, node: str, batch: EventBatch) -> list[BlockEvent | LostEvents]:
        ends = list(accumulate(batch.blocks, initial=0))
        if ends[-1] != len(batch.keys) or not set(batch.kinds) <= KINDS.keys() or 0 in batch.blocks:
            raise ProtocolError("the node sent malformed events, or events of a kind unknown to this release")
        found: list[BlockEvent | LostEvents] = []
        for kind, time_us, start, end in zip(batch.kinds, batch.times_us, ends, ends[1:], strict=False):
            self._count(kind, end - start)
            sizes: Sequence[int] = list(batch.sizes[start:end])
            columns = (batch.keys[start:end], batch.parents[start:end], sizes)
            found.append(BlockEvent(KINDS[kind], time_us / 1000, node, self._settings.tenant, *columns))
        return found

    def _count(self, kind: int, blocks: int) -> None:
        counts = self.counts
        if kind == event_messages.STORED:
            counts.stored += blocks
        elif kind == event_messages.READ:
            counts.read += blocks
        else:
            counts.removed += blocks
