"""Engines' answers on their way to the client: server-sent events, out and in, and the members that the router reads. Sans-I/O.

The reader takes usage, the response's id, and a failure. Of events only data is of use; names, ids, retry times and comments are skipped.
Source: WHATWG HTML, section 9.2 (server-sent events).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from kvstore.protocol.errors import ProtocolError

DONE: Final = "[DONE]"
"""The data of the last event of a stream, as OpenAI has it."""
MAX_EVENT_BYTES: Final = 1 << 20
"""An event is a few tokens; a peer that sends this much without an end is not speaking SSE."""
FAILED: Final = ("abort", "error")
"""The finish_reason of a request that an engine dropped: no answer ends so."""
SHOWN_CHARACTERS: Final = 300
"""Of an engine's error message."""


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


class AnswerReader:
    """Reads an answer, whole or as a stream of events. What it does not understand it ignores: the client gets it all the same."""

    def __init__(self, *, is_stream: bool) -> None:
        self.prompt_tokens: int | None = None
        """These three: as `usage` has them; None: the answer has none so far."""
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.parts = 0
        """Events so far with a piece of the output: about as many tokens."""
        self.response_id: str | None = None
        """Of /v1/responses."""
        self.failure: str | None = None
        """The engine's message for a request that it dropped."""
        self.is_done = False
        """The stream's last event has arrived."""
        self._is_stream = is_stream
        self._parser = EventParser()
        self._is_readable = True

    def feed(self, chunk: bytes) -> None:
        """Of a stream: the next bytes; of a whole answer: all of it, once."""
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
        """The count of `usage`, or else the number of events."""
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
                    self.failure = f"it gave the request up: {choice['finish_reason']}"

    def _read_usage(self, usage: Any) -> None:
        """Chats and completions say prompt_tokens and completion_tokens, responses input_tokens and output_tokens."""
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = _first_count(usage, "prompt_tokens", "input_tokens")
        self.completion_tokens = _first_count(usage, "completion_tokens", "output_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _first_count(details, "cached_tokens")


def error_message(answer: Any) -> str:
    """The message of an error in OpenAI's form, or else the whole of it."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message).strip()[:SHOWN_CHARACTERS] or "nothing more"


def _first_count(values: Mapping[str, Any], *names: str) -> int | None:
    """The first of these members that is a whole number, not negative."""
    return next((value for name in names if isinstance(value := values.get(name), int) and value >= 0), None)
