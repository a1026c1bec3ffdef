"""Requests parked after a failover. The new owner has all records, but nodes have not registered again: it would report
misses for blocks that still exist.

A request for a block is parked if its only holders have yet to register. It waits for them, or until
`takeover_wait_s` has passed: a node may have died with the former owner. Puts wait too, since they would write
existing blocks again; so do pins, removals and replication. Actions on a whole namespace wait for all nodes. The
loop is the only caller."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.master.directory.directory import Directory
from kvstore.protocol.frames import FrameHeader
from kvstore.rpc.server.session import Session

MAX_WAITING_KEYS: Final = 1 << 18
"""Keys of all parked requests, which are repeated at most ten times a second. Further requests are answered from the
current state."""


class _ParkedRequest(NamedTuple):
    session: Session
    request_id: int
    key_count: int
    retry: Callable[[], None]


class RecoveryBarrier:
    """Parks requests until nodes have registered. `awaited` has the ids of these nodes: nearly always empty, and
    then `park` need not be called."""

    def __init__(self, directory: Directory, until_ns: int, blocks_elsewhere: Callable[[int], int] = lambda _node_id: 0) -> None:
        """For a new owner, with its records loaded. No node is awaited after `until_ns`. `blocks_elsewhere` returns
        a node's blocks in other partitions: their readers get the node table from this owner."""
        self._directory = directory
        self._blocks_elsewhere = blocks_elsewhere
        self._until_ns = until_ns
        self._waiting: list[_ParkedRequest] = []
        self._key_count = 0
        self._actions: list[Callable[[], None]] = []
        self._why_over = ""
        self.awaited = self._holders()
        self._seen_state = self._state()

    def expects_nodes(self, now_ns: int) -> bool:
        """Return True while a node that has not registered since the failover may still do so in time."""
        return now_ns < self._until_ns

    def park(
        self,
        session: Session,
        header: FrameHeader,
        tenant: str,
        keys: Sequence[bytes],
        retry: Callable[[], None],
        *,
        needs_connection: bool = False,
    ) -> bool:
        """Park a request for these keys, and return True, if their holders are awaited. `retry` repeats it when
        nodes have registered; its exception becomes the response. `needs_connection`: holders will get a command over their
        connection, so that also registered nodes without one are awaited."""
        return self._must_wait(tenant, keys, needs_connection=needs_connection) and self._park(
            _ParkedRequest(session, header.request_id, len(keys), retry)
        )

    def park_all(self, session: Session, header: FrameHeader, retry: Callable[[], None]) -> bool:
        """As `park`, for a request about the nodes themselves."""
        return self._park(_ParkedRequest(session, header.request_id, 1, retry))

    def run_when_recovered(self, action: Callable[[], None]) -> None:
        """Run an action on a namespace once no node is awaited: usually at once, and never after `end`. It must not
        raise."""
        if self.awaited:
            self._actions.append(action)
        else:
            action()

    def node_connected(self, node_id: int) -> None:
        """The node begins its inventory after registration: its connection takes commands from now on, not yet at
        its Welcome. Requests that await further nodes are repeated in the next tick, so that a thousand nodes cause
        few repeats."""
        if node_id in self.awaited:
            self.awaited -= {node_id}
            if not self.awaited:
                self._retry_parked()

    def run_due(self, now_ns: int) -> None:
        """End the wait at its deadline, drop forgotten nodes, and repeat requests after a change. Otherwise drop
        requests of closed sessions."""
        if self.awaited:
            self.awaited = self.awaited & self._holders() if now_ns < self._until_ns else frozenset()
            if self._state() != self._seen_state:
                self._retry_parked()
            else:
                self._waiting = [waiting for waiting in self._waiting if waiting.session.is_open]
                self._key_count = sum(waiting.key_count for waiting in self._waiting)

    def end(self, why: str) -> None:
        """The epoch is over: close the sessions of parked requests, and of later ones, so that their clients look
        for the next owner. After the deadline requests are answered from the current state: there may be no owner
        for long."""
        self._why_over = why
        self._actions.clear()
        for waiting in self._take_all():
            waiting.session.close(why)

    def _retry_parked(self) -> None:
        self._seen_state = self._state()
        if not self.awaited:
            actions, self._actions = self._actions, []
            for action in actions:
                action()
        for waiting in self._take_all():
            if waiting.session.is_open:
                try:
                    waiting.retry()
                except Exception as error:  # any error: the requests behind it are in no list any more
                    waiting.session.fail(waiting.request_id, error)

    def _take_all(self) -> list[_ParkedRequest]:
        taken, self._waiting, self._key_count = self._waiting, [], 0
        return taken

    def _park(self, request: _ParkedRequest) -> bool:
        if self._why_over:
            is_early = request.session.reactor.now_ns() < self._until_ns
            if is_early:
                request.session.close(self._why_over)
            return is_early
        if self._key_count + request.key_count > MAX_WAITING_KEYS:
            return False
        self._key_count += request.key_count
        self._waiting.append(request)
        return True

    def _state(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the state that responses depend on: awaited nodes, and registered ones."""
        return self.awaited, self._directory.columns()[0].sets.live_nodes

    def _holders(self) -> frozenset[int]:
        """Return the nodes that are listed as holders."""
        members = [node.node_id for node in self._directory.members]
        return frozenset(node_id for node_id in members if self._directory.blocks_at(node_id) or self._blocks_elsewhere(node_id))

    def _must_wait(self, tenant: str, keys: Sequence[bytes], *, needs_connection: bool) -> bool:
        """Return True if an unreadable key has awaited holders; with `needs_connection` also if an awaited holder has
        registered and is not connected."""
        flags = self._directory.queries.exists(tenant, keys)
        missing = [key for key, is_there in zip(keys, flags, strict=True) if not is_there]
        if any(self._awaited_holders(tenant, missing)):
            return True
        return needs_connection and any(map(self._is_live, self._awaited_holders(tenant, keys)))

    def _is_live(self, node_id: int) -> bool:
        member = self._directory.members.get(node_id)
        return member is not None and member.is_live

    def _awaited_holders(self, tenant: str, keys: Sequence[bytes]) -> Iterator[int]:
        """Yield awaited nodes that are listed for any of the keys. Ids are never 0."""
        if keys:
            rows, _tenants = self._directory.columns()
            sets = {rows.holders[row] for row in self._directory.queries.rows_of(tenant, keys).tolist()}
            yield from (node_id for index in sets for node_id, _state in rows.sets[index] if node_id in self.awaited)
