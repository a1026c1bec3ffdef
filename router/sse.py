"""Server-sent events: the frames of a streamed answer, out and in. Sans-I/O.

Only data is of use here; names, ids, retry times and comments of a peer's events are passed over.
Source: WHATWG HTML, section 9.2 (server-sent events).
"""

import json
from typing import Any, Final

from kvstore.protocol.errors import ProtocolError

DONE: Final = "[DONE]"
"""The data of the last event of a stream, as OpenAI has it."""
MAX_EVENT_BYTES: Final = 1 << 20
"""An event is a few tokens; a peer that sends this much without an end is not speaking SSE."""


def event(data: dict[str, Any]) -> bytes:
    """The frame of one event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def done() -> bytes:
    """The frame that ends a stream."""
    return f"data: {DONE}\n\n".encode()


class EventParser:
    """Bytes in, however cut; the data of whole events out."""

    def __init__(self) -> None:
        self._left = b""
        self._data: list[bytes] = []
        self._size_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that are complete with `chunk`. Raises ProtocolError: too long an event, or not UTF-8."""
        events: list[str] = []
        lines = (self._left + chunk).split(b"\n")
        self._left = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size_bytes += len(line)
            elif not line and self._data:
                events.append(_text(b"\n".join(self._data)))
                self._data, self._size_bytes = [], 0
        if self._size_bytes + len(self._left) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"an event is not UTF-8: {error.reason}") from None
