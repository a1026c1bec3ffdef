"""Parser of engines' responses: server-sent events, token usage, response id and failures. Sans-I/O.

Only the data of events is used; names, ids, retry times and comments are skipped. Source: WHATWG HTML, section 9.2 (server-sent events).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from kvstore.protocol.errors import ProtocolError

DONE: Final = "[DONE]"
"""Data of the last event of a stream in OpenAI's API."""
MAX_EVENT_BYTES: Final = 1 << 20
"""An event has a few tokens; a larger one is not SSE."""
FAILED: Final = ("abort", "error")
"""finish_reason of a request that the engine dropped."""
SHOWN_CHARACTERS: Final = 300
"""Most characters of an engine's error message that are passed on."""


def event(data: dict[str, Any]) -> bytes:
    """Encode one event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def done() -> bytes:
    """Encode the event that ends a stream."""
    return f"data: {DONE}\n\n".encode()


class EventParser:
    """Incremental SSE parser: takes chunks of any size, returns the data of complete events."""

    def __init__(self) -> None:
        self._left = b""
        self._data: list[bytes] = []
        self._size_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events that `chunk` completes. Raises ProtocolError for an event that is too long or not UTF-8."""
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
            raise ProtocolError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        return events


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"an event is not UTF-8: {error.reason}") from None


class AnswerReader:
    """Reads usage and failures from a response, whole or streamed. Unknown content is ignored, because it is passed on unchanged."""

    def __init__(self, *, is_stream: bool) -> None:
        self.prompt_tokens: int | None = None
        """The three token counts are those of `usage`; None: not received yet."""
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.parts = 0
        """Number of events with output so far, about the number of tokens."""
        self.response_id: str | None = None
        """Id in /v1/responses."""
        self.failure: str | None = None
        """Error message of a request that the engine dropped."""
        self.is_done = False
        """The stream's last event has arrived."""
        self._is_stream = is_stream
        self._parser = EventParser()
        self._is_readable = True

    def feed(self, chunk: bytes) -> None:
        """Read the next chunk of a stream, or the whole of another response."""
        if not self._is_stream:
            self._read(chunk)
        elif self._is_readable:
            try:
                for data in self._parser.feed(chunk):
                    self.is_done = data == DONE
                    if not self.is_done:
                        self._read(data)
            except ProtocolError:
                self._is_readable = False

    def output_tokens(self) -> int:
        """Return the count of `usage`, or else the number of events."""
        return self.parts if self.completion_tokens is None else self.completion_tokens

    def _read(self, text: str | bytes) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(value, dict):
            return
        if value.get("error") and value.get("object") != "response":
            self.failure = error_message(value)
        self._read_choices(value)
        response = value["response"] if isinstance(value.get("response"), dict) else value
        if response.get("object") == "response" and isinstance(response.get("id"), str):
            self.response_id = response["id"]
        self._read_usage(response.get("usage"))

    def _read_choices(self, answer: Mapping[str, Any]) -> None:
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self.parts += 1
                if choice.get("finish_reason") in FAILED:
                    self.failure = f"it dropped the request: {choice['finish_reason']}"

    def _read_usage(self, usage: Any) -> None:
        """Chats and completions have prompt_tokens and completion_tokens, responses input_tokens and output_tokens."""
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = _first_count(usage, "prompt_tokens", "input_tokens")
        self.completion_tokens = _first_count(usage, "completion_tokens", "output_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _first_count(details, "cached_tokens")


def error_message(answer: Any) -> str:
    """Return the message of an error in OpenAI's form, or the whole text of another one."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message).strip()[:SHOWN_CHARACTERS] or "no message"


def _first_count(values: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these members that is a non-negative integer."""
    return next((value for name in names if isinstance(value := values.get(name), int) and value >= 0), None)
