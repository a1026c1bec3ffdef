"""Records what happens to a tenant's blocks on every node of a running cluster: asks each node in turn what it saw since it was asked last.

It goes on with the nodes that answer, whatever becomes of the others and of the master, says what is missing, and leaves a gap in the
recording. It writes no file and waits for nothing but answers: see cli/record.py. Not thread-safe.
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
"""How often the master is asked for nodes that are new or back."""
MAX_ROUNDS: Final = 64
"""Questions to one node in a row, so that one that is always busy does not keep the others waiting: 262,144 blocks."""
KINDS: Final = {event_messages.STORED: STORED, event_messages.READ: READ, event_messages.REMOVED: REMOVED}


@dataclass(slots=True)
class RecordCounts:
    """What was recorded so far. `stored`, `read`, `removed` and `lost` count blocks; of other gaps only their number is known."""

    stored: int = 0
    read: int = 0
    removed: int = 0
    lost: int = 0
    """Overwritten at a node before they were asked for."""
    interruptions: int = 0
    """Times that a node was not recorded from its start, or its last answer, on."""


@dataclass(slots=True)
class _RecorderConnection:
    name: str
    channel: Channel
    cursor: int = 0


class Recorder:
    """See the module. `say` is called with each thing that a person should know. A context manager."""

    def __init__(
        self,
        settings: ClientSettings,
        say: Callable[[str], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], float] = lambda: time.time() * 1000,
    ) -> None:
        """Begin on all nodes that the master names. Raises InvalidArgument for a malformed address, Unavailable when no master answers,
        Unauthorized for a wrong token."""
        self._settings = settings
        self._say = say
        self._now_s = now_s
        self._wall_ms = wall_ms
        self._masters = known_masters(settings)
        self._tls = Certificates.of(settings)
        self._hello = Hello(ROLE_CLIENT, settings.tenant, settings.token, "recorder")
        self._links: dict[str, _RecorderConnection] = {}
        """By name: another master may give a node another id."""
        self._missing: set[str] = set()
        """Names of nodes that could not be asked, which has been said."""
        self._is_master_away = False
        self._refreshed_s = now_s()
        self.counts = RecordCounts()
        for name, tcp, ticket in self._nodes():
            self._begin(name, tcp, ticket)

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes that are recorded now."""
        return sorted(self._links)

    @property
    def unheard(self) -> list[str]:
        """Who cannot be asked now: the master, and nodes by name."""
        return ["the master"] * self._is_master_away + [f"node {name}" for name in sorted(self._missing)]

    def poll(self) -> list[BlockEvent | LostEvents]:
        """What happened since, each node's in its order. Raises nothing of the cluster's: that is said, and is a gap."""
        found: list[BlockEvent | LostEvents] = []
        if self._now_s() - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = self._now_s()
            found += self._refresh()
        for name, link in list(self._links.items()):
            try:
                self._drain(link, found)
            except KVStoreError as error:
                link.channel.close()
                del self._links[name]
                self._miss(name, error)
        return found

    def close(self) -> None:
        """Hang up: the nodes stop recording."""
        for link in self._links.values():
            link.channel.close()
        self._links.clear()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- which nodes ---

    def _refresh(self) -> list[BlockEvent | LostEvents]:
        """Begin on nodes that are new or back; what they did until now is a gap."""
        try:
            nodes = self._nodes()
        except KVStoreError as error:
            if not self._is_master_away:
                self._say(f"{error}; recording goes on without it")
            self._is_master_away = True
            return []
        self._is_master_away = False
        self._missing &= {name for name, _, _ in nodes}
        gaps: list[BlockEvent | LostEvents] = []
        for name, tcp, ticket in nodes:
            if name not in self._links and self._begin(name, tcp, ticket):
                self._say(f"node {name} is recorded from now on")
                self.counts.interruptions += 1
                gaps.append(LostEvents(self._wall_ms(), name, self._settings.tenant, None))
        return gaps

    def _nodes(self) -> list[tuple[str, str, bytes]]:
        """(name, address, ticket) of each live node. Raises Unavailable when no master answers as the owner of the catalog, and what one
        that does has against us."""
        timeout_s = self._settings.connect_timeout_s
        deadline = Deadline(timeout_s * (len(self._masters.in_order()) + MAX_NAMED))
        channel = find_owner(self._masters, self._hello, deadline, attempt_s=timeout_s, tls=self._tls)
        try:
            table = channel.call(Nodes(), NodeTable, Deadline(timeout_s))
        finally:
            channel.close()
        return list(zip(table.names, table.tcp, table.tickets or [b""] * len(table.ids), strict=True))

    def _begin(self, name: str, tcp: str, ticket: bytes) -> bool:
        """Whether the node is recorded from now on; why not is said."""
        deadline = Deadline(self._settings.connect_timeout_s)
        channel = None
        try:
            channel = Channel.open(parse_address(tcp), replace(self._hello, token="", ticket=ticket), deadline, tls=self._tls)
            link = _RecorderConnection(name, channel)
            link.cursor = channel.call(FetchEvents(0), EventBatch, deadline).next_cursor
        except KVStoreError as error:
            if channel is not None:
                channel.close()
            self._miss(name, error)
            return False
        self._links[name] = link
        self._missing.discard(name)
        return True

    def _miss(self, name: str, error: KVStoreError) -> None:
        if name not in self._missing:
            self._say(f"node {name} is not recorded: {error}")
        self._missing.add(name)

    # --- what they saw ---

    def _drain(self, link: _RecorderConnection, found: list[BlockEvent | LostEvents]) -> None:
        """Append what the node tells, until it has little more. Raises whatever goes wrong with it."""
        for _ in range(MAX_ROUNDS):
            batch = link.channel.call(FetchEvents(link.cursor), EventBatch, Deadline(self._settings.connect_timeout_s))
            if batch.lost:
                self._say(f"node {link.name} did more than was asked for in time: {batch.lost} events are lost")
                self.counts.lost += batch.lost
                found.append(LostEvents(self._wall_ms(), link.name, self._settings.tenant, batch.lost))
            found += self._events(link.name, batch)
            link.cursor = batch.next_cursor
            if len(batch.keys) < MAX_ANSWER_EVENTS // 2:
                return

    def _events(self, node: str, batch: EventBatch) -> list[BlockEvent | LostEvents]:
        ends = list(accumulate(batch.blocks, initial=0))
        if ends[-1] != len(batch.keys) or not set(batch.kinds) <= KINDS.keys() or 0 in batch.blocks:
            raise ProtocolError("it tells of events that this release does not know")
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
