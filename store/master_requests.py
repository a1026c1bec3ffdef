"""What a node asks its master over their link: each question is answered once, by the message expected or by an error."""

from collections.abc import Callable
from typing import Final, TypeVar

from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.message import Message
from kvstore.rpc.server.session import Session

M = TypeVar("M", bound=Message)

ANSWER_TIMEOUT_S: Final = 3600.0
"""The master answers a Publish when its catalog has it, however long that is away; a broken link is noticed by itself."""


def ask(
    session: Session,
    message: Message,
    kind: type[M],
    answered: Callable[[M | KVStoreError], None],
    *,
    deadline_s: float = ANSWER_TIMEOUT_S,
) -> None:
    """Call `answered` once: with the answer, the master's error, Unavailable (the link broke) or DeadlineExceeded."""

    def on_reply(header: FrameHeader | None, body: memoryview | KVStoreError) -> None:
        if isinstance(body, KVStoreError):
            answered(body)
        elif header is not None and header.type == kind.TYPE:
            try:
                reply = kind.unpack(body)
            except ProtocolError as error:
                answered(error)
                raise  # whoever sends such a thing is hung up on
            answered(reply)
        else:
            answered(ProtocolError(f"the master answered a {type(message).__name__} with something else"))

    session.request(message, on_reply, deadline_s=deadline_s)
