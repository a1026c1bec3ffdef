"""Requests of a node to its master over their connection: each gets one reply or one error."""

from collections.abc import Callable
from typing import Final, TypeVar

from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.message import Message
from kvstore.rpc.server.session import Session

M = TypeVar("M", bound=Message)

ANSWER_TIMEOUT_S: Final = 3600.0
"""The master answers a Publish once its catalog has it, however slow that is. A broken link is detected separately."""


def request_master(
    session: Session,
    message: Message,
    kind: type[M],
    answered: Callable[[M | KVStoreError], None],
    *,
    deadline_s: float = ANSWER_TIMEOUT_S,
) -> None:
    """Send a request and call `answered` once: with the reply, the master's error, Unavailable (the link broke) or
    DeadlineExceeded."""

    def on_reply(header: FrameHeader | None, body: memoryview | KVStoreError) -> None:
        if isinstance(body, KVStoreError):
            answered(body)
        elif header is not None and header.type == kind.TYPE:
            try:
                reply = kind.unpack(body)
            except ProtocolError as error:
                answered(error)
                raise  # closes the connection
            answered(reply)
        else:
            answered(ProtocolError(f"the master answered {type(message).__name__} with a message that is not {kind.__name__}"))

    session.request(message, on_reply, deadline_s=deadline_s)
