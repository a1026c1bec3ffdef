"""Queue of inventory comparisons: one slice of the directory in each time slice, one node after the other. So fifty
nodes that reconnect at once delay the loop no more than one. The loop is the only caller."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.master.catalogs.group_commit import Committer
from kvstore.master.catalogs.interface import Change
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.index.inventory_comparison import DigestComparison
from kvstore.protocol.catalog_messages import Digests
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.server.session import Session

log = logging.getLogger("kvstore.master")


@dataclass(slots=True)
class _PendingDigests:
    """Digests of one node without a response yet."""

    session: Session
    comparison: DigestComparison
    epoch: int
    request_ids: list[int] = field(default_factory=list)


class InventoryComparisons:
    """Runs comparisons one after the other. Counts `compared` in `counters`."""

    def __init__(self, directory: Directory, committer: Committer, counters: dict[str, int]) -> None:
        self._directory = directory
        self._committer = committer
        self._counters = counters
        self._asked: dict[int, _PendingDigests] = {}
        """By node."""
        self._queue: deque[tuple[_PendingDigests, Iterator[list[Change]]]] = deque()

    def take(self, session: Session, header: FrameHeader, node_id: int, message: Digests) -> None:
        """Add a message; the responses follow once the last one has arrived and all are compared. Raises StaleEpoch,
        InvalidArgument: the comparison is dropped."""
        asked = self._asked.get(node_id)
        if asked is None or asked.epoch != message.epoch:
            comparison = self._directory.compare(node_id, message.epoch)
            asked = self._asked[node_id] = _PendingDigests(session, comparison, message.epoch)
        try:
            is_last = asked.comparison.take(message)
        except BaseException:
            self.end(node_id)
            raise
        asked.request_ids.append(header.request_id)
        if is_last:
            del self._asked[node_id]
            self._queue.append((asked, asked.comparison.steps()))
            if len(self._queue) == 1:
                session.reactor.call_soon(self._run_slice(session.reactor.call_soon))

    def end(self, node_id: int) -> None:
        """The node begins or ends an inventory: drop its incomplete digests."""
        self._asked.pop(node_id, None)

    def _run_slice(self, soon: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
        def proceed() -> None:
            asked, steps = self._queue[0]
            try:
                ops = next(steps, None) if asked.session.is_open else None
                if ops:
                    self._committer.commit(ops)
            except Exception:  # this node sends all its blocks
                log.exception("an inventory could not be compared")
                ops = None
            if ops is None:
                self._queue.popleft()
                if asked.session.is_open:
                    self._answer(asked)
            if self._queue:  # even after a failure: those behind it must not wait for ever
                soon(proceed)

        return proceed

    def _answer(self, asked: _PendingDigests) -> None:
        self._counters["compared"] += asked.comparison.blocks
        try:
            for request_id, flags in zip(asked.request_ids, asked.comparison.flags(), strict=True):
                asked.session.reply(request_id, Flags(flags))
        except Exception:  # the node would wait for the missing responses; after a reconnection it starts over
            log.exception("a compared inventory could not be answered")
            asked.session.close("an internal error")
