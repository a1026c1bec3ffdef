"""Connections of the nodes, and commands sent over them. The loop is the only caller."""

import logging
from collections.abc import Callable, Sequence

from kvstore.master.directory.placement.commands import NodeCommands
from kvstore.protocol.catalog_messages import (
    CopyBlocks,
    DeleteBlocks,
    MarkSecondary,
    PrefetchBlocks,
    RevokeCredentials,
    SetDraining,
    SetPinned,
    TicketKey,
)
from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.server.session import Session

Command = DeleteBlocks | SetPinned | CopyBlocks
Notification = SetDraining | TicketKey | RevokeCredentials | PrefetchBlocks | MarkSecondary
Answers = list[tuple[int, Command, bytes | None]]
"""(node id, command, flags or None without a response)."""

log = logging.getLogger("kvstore.master")


class NodeConnections:
    """At most one session for each node. Counts `commands_failed` in `counters`."""

    def __init__(self, counters: dict[str, int], *, command_timeout_s: float) -> None:
        self._counters = counters
        self._command_timeout_s = command_timeout_s
        self._connections: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def get(self, node_id: int) -> Session | None:
        return self._connections.get(node_id)

    def enter(self, node_id: int, session: Session) -> None:
        """Set the node's connection; a former one is closed."""
        former, self._connections[node_id] = self._connections.get(node_id), session
        if former is not None and former is not session:
            former.close("the node has registered again")

    def leave(self, node_id: int, session: Session) -> bool:
        """The session is over. Return True if it was the node's connection."""
        if self._connections.get(node_id) is not session:
            return False
        del self._connections[node_id]
        return True

    def forget(self, node_id: int) -> None:
        """Close the connection of a forgotten node, if any."""
        session = self._connections.pop(node_id, None)
        if session is not None:
            session.close("the node is forgotten")

    def send(self, commands: NodeCommands) -> None:
        """Send commands whose responses are not needed: the nodes' own events follow."""
        self.command(commands, lambda _answers: None)

    def command(self, commands: NodeCommands, then: Callable[[Answers], None]) -> None:
        """Send commands; see `order` for `then`."""
        self.order(commands.messages(), then)

    def order(self, messages: Sequence[tuple[int, Command]], then: Callable[[Answers], None]) -> None:
        """Send commands, and call `then` with all responses."""
        answers: Answers = []
        if not messages:
            then(answers)
            return

        def answered(node_id: int, message: Command, flags: bytes | None) -> None:
            answers.append((node_id, message, flags))
            if len(answers) == len(messages):
                then(answers)

        for node_id, message in messages:
            session = self._connections.get(node_id)
            if session is None:
                answered(node_id, message, None)
            else:
                session.request(message, self._on_answer(node_id, message, answered), deadline_s=self._command_timeout_s)

    def notify(self, node_id: int, message: Notification, answer: type[Message], then: Callable[[bool], None]) -> None:
        """Send a node a message that needs no flags in return. Call `then` with True if it responds with `answer`; False
        without a connection."""
        session = self._connections.get(node_id)
        if session is None:
            then(False)
            return

        def on_reply(header: FrameHeader | None, body: memoryview | KVStoreError) -> None:
            is_done = header is not None and header.type == answer.TYPE and not isinstance(body, KVStoreError)
            if not is_done:
                self._counters["commands_failed"] += 1
                why = body if isinstance(body, KVStoreError) else f"no {answer.__name__}"
                log.warning("node %d did not acknowledge %s: %s", node_id, type(message).__name__, why)
            then(is_done)

        session.request(message, on_reply, deadline_s=self._command_timeout_s)

    def disconnect(self, node_id: int, why: str) -> None:
        """Close a node's connection; the node registers again."""
        session = self._connections.get(node_id)
        if session is not None:
            session.close(why)

    def node_ids(self) -> list[int]:
        """Return the ids of connected nodes."""
        return list(self._connections)

    def _on_answer(
        self, node_id: int, message: Command, answered: Callable[[int, Command, bytes | None], None]
    ) -> Callable[[FrameHeader | None, memoryview | KVStoreError], None]:
        def on_reply(header: FrameHeader | None, body: memoryview | KVStoreError) -> None:
            flags = None
            try:
                flags = _flags_of(header, body, len(message.keys))
            except KVStoreError as error:
                self._counters["commands_failed"] += 1
                log.warning("node %d did not carry out a command: %s", node_id, error)
            answered(node_id, message, flags)

        return on_reply


def _flags_of(header: FrameHeader | None, body: memoryview | KVStoreError, count: int) -> bytes:
    """Return the flags of a node's response to a command on `count` blocks. Raises its error, or ProtocolError for
    another response."""
    if isinstance(body, KVStoreError):
        raise body
    flags = Flags.unpack(body).flags
    if header is None or header.type != Flags.TYPE or len(flags) != count:
        raise ProtocolError(f"the response is not {count} flags")
    return flags
