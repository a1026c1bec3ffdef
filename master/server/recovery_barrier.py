"""Questions that wait for nodes to come. A master that has just taken over has the records of all blocks, and no node has found it yet: it
would answer with misses for blocks that are where they always were.

So a question about a block that only nodes hold which have not registered with this owner is kept until they have, or for a set time, for a
node may have died together with the former owner. Whoever asks waits, as he does while there is no owner. A put asks, too: what is there
would else be written once more; and so does who pins, lets go, removes or replicates: it is there. What is done to a whole
namespace waits for all of them. The loop is the only caller.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.master.directory.directory import Directory
from kvstore.protocol.frames import FrameHeader
from kvstore.rpc.server.session import Session

MAX_WAITING_KEYS: Final = 1 << 18
"""Of all questions that wait, which are asked anew when nodes have come, ten times a second at most. What is asked beyond is answered by
what is known."""


class _ParkedRequest(NamedTuple):
    session: Session
    request_id: int
    key_count: int
    again: Callable[[], None]


class RecoveryBarrier:
    """`awaited` are the ids of the nodes that are waited for: but for moments none, and then `hold_up` need not be called."""

    def __init__(self, directory: Directory, until_ns: int, blocks_elsewhere: Callable[[int], int] = lambda _node_id: 0) -> None:
        """Of an owner that has just been made, on the records that it found. Nobody is waited for beyond `until_ns`. `blocks_elsewhere`:
        how many blocks of other partitions a node holds; who reads these asks this owner for the node."""
        self._directory = directory
        self._blocks_elsewhere = blocks_elsewhere
        self._until_ns = until_ns
        self._waiting: list[_ParkedRequest] = []
        self._key_count = 0
        self._actions: list[Callable[[], None]] = []
        self._why_over = ""
        self.awaited = self._holding()
        self._heeded = self._news()

    def hold_up(
        self, session: Session, header: FrameHeader, tenant: str, keys: Sequence[bytes], again: Callable[[], None], *, is_told: bool = False
    ) -> bool:
        """Whether a question about these keys waits: `again`, which asks it anew, is called when there is news. What it raises is the
        answer. `is_told`: holders are to be told something over their links, so that it waits for those that have but registered, too."""
        return self._are_concerned(tenant, keys, is_told=is_told) and self._keep(
            _ParkedRequest(session, header.request_id, len(keys), again)
        )

    def hold_up_all(self, session: Session, header: FrameHeader, again: Callable[[], None]) -> bool:
        """As `hold_up`, of a question about the nodes themselves."""
        return self._keep(_ParkedRequest(session, header.request_id, 1, again))

    def once_all_came(self, action: Callable[[], None]) -> None:
        """Do something to all blocks of a namespace, once nobody is waited for any more: at once, as a rule, and never after `end`. It
        raises nothing."""
        if self.awaited:
            self._actions.append(action)
        else:
            action()

    def came(self, node_id: int) -> None:
        """The node has registered and begins its inventory: it has its link, by which it can be told what is done to its blocks. Not as
        soon as it has a Welcome, for what comes along with that finds nobody yet. Who waits for others as well is looked at in the next
        tick: a thousand nodes would be as many looks."""
        if node_id in self.awaited:
            self.awaited -= {node_id}
            if not self.awaited:
                self._ask_again()

    def tick(self, now_ns: int) -> None:
        """Let time pass; some nodes may have been forgotten as well. While nobody comes only who has hung up is forgotten."""
        if self.awaited:
            self.awaited = self.awaited & self._holding() if now_ns < self._until_ns else frozenset()
            if self._news() != self._heeded:
                self._ask_again()
            else:
                self._waiting = [waiting for waiting in self._waiting if waiting.session.is_open]
                self._key_count = sum(waiting.key_count for waiting in self._waiting)

    def end(self, why: str) -> None:
        """This master owns it no longer, and no node comes any more: hang up on those who wait, and who would, so that they look for the
        next owner. Once the time is over questions are answered by what is known: there may be none for long."""
        self._why_over = why
        self._actions.clear()
        for waiting in self._taken():
            waiting.session.close(why)

    def _ask_again(self) -> None:
        self._heeded = self._news()
        if not self.awaited:
            actions, self._actions = self._actions, []
            for action in actions:
                action()
        for waiting in self._taken():
            if waiting.session.is_open:
                try:
                    waiting.again()
                except Exception as error:  # whatever it is: those behind it are in no list any more
                    waiting.session.fail(waiting.request_id, error)

    def _taken(self) -> list[_ParkedRequest]:
        taken, self._waiting, self._key_count = self._waiting, [], 0
        return taken

    def _keep(self, question: _ParkedRequest) -> bool:
        if self._why_over:
            is_early = question.session.reactor.now_ns() < self._until_ns
            if is_early:
                question.session.close(self._why_over)
            return is_early
        if self._key_count + question.key_count > MAX_WAITING_KEYS:
            return False
        self._key_count += question.key_count
        self._waiting.append(question)
        return True

    def _news(self) -> tuple[frozenset[int], frozenset[int]]:
        """What answers depend on: who is waited for, and who has registered."""
        return self.awaited, self._directory.columns()[0].sets.live_nodes

    def _holding(self) -> frozenset[int]:
        """Nodes that hold a block, by what is known of them."""
        members = [node.node_id for node in self._directory.members]
        return frozenset(node_id for node_id in members if self._directory.blocks_at(node_id) or self._blocks_elsewhere(node_id))

    def _are_concerned(self, tenant: str, keys: Sequence[bytes], *, is_told: bool) -> bool:
        """One of the keys cannot be read now, and awaited nodes hold it; or one of these has registered and has yet to get its link."""
        flags = self._directory.queries.exists(tenant, keys)
        missing = [key for key, is_there in zip(keys, flags, strict=True) if not is_there]
        if any(self._awaited_holders(tenant, missing)):
            return True
        return is_told and any(map(self._is_live, self._awaited_holders(tenant, keys)))

    def _is_live(self, node_id: int) -> bool:
        member = self._directory.members.get(node_id)
        return member is not None and member.is_live

    def _awaited_holders(self, tenant: str, keys: Sequence[bytes]) -> Iterator[int]:
        """Nodes that are waited for and hold one of the keys, by what is known. Ids are never 0."""
        if keys:
            rows, _tenants = self._directory.columns()
            sets = {rows.holders[row] for row in self._directory.queries.rows_of(tenant, keys).tolist()}
            yield from (node_id for index in sets for node_id, _state in rows.sets[index] if node_id in self.awaited)
