"""The JSON that clients get: answers, events of a stream, and errors, in the form of OpenAI's API. Sans-I/O."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvstore.client.instances.client import Refusal
from kvstore.protocol.errors import DeadlineExceeded, Denied, InvalidArgument, KVStoreError, Retry
from kvstore.scheduler.decision import Reason

MAX_RETRY_AFTER_S: Final = 60
"""What was foreseen beyond that will have changed by then."""
UNITS: Final = {Reason.TTFT: "s", Reason.TBT: "s", Reason.CAPACITY: "tokens", Reason.PREFILL_LOAD: "s", Reason.DECODE_LOAD: "s"}
"""Of a rejection's value and limit: a load is a time to first token or between tokens, as foreseen."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer."""

    text: str
    tokens: int
    finish_reason: str | None = None
    """Why the answer ends with it; None: it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all parts of one answer say of it."""

    id: str
    model: str
    created: int
    """Seconds since 1970."""
    is_chat: bool
    prompt_tokens: int

    def usage(self, completion_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The answer that is not streamed. One part has a reason; others may come after it."""
        parts = list(pieces)
        text, reasons = "".join(part.text for part in parts), [part.finish_reason for part in parts if part.finish_reason]
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reasons[-1]}
        usage = self.usage(sum(part.tokens for part in parts))
        return {**self._members(chunk=False), "choices": [choice], "usage": usage}

    def opening(self) -> dict[str, Any] | None:
        """The event before the first piece; None where there is none."""
        return self._event({"delta": {"role": "assistant", "content": ""}}, None) if self.is_chat else None

    def part(self, piece: Piece) -> dict[str, Any]:
        """The event of one piece."""
        said: dict[str, Any] = {"delta": {"content": piece.text} if piece.text else {}} if self.is_chat else {"text": piece.text}
        return self._event(said, piece.finish_reason)

    def last(self, completion_tokens: int) -> dict[str, Any]:
        """The event with the usage."""
        return {**self._members(chunk=True), "choices": [], "usage": self.usage(completion_tokens)}

    def _event(self, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {**self._members(chunk=True), "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}]}

    def _members(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why there is no answer: a status of HTTP, and the error of the body."""

    status: int
    type: str
    message: str
    code: str | None = None
    retry_after_s: int | None = None
    details: tuple[tuple[str, Any], ...] = ()
    """Further members of the error."""

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": None, "code": self.code, **dict(self.details)}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def problem_of(error: KVStoreError) -> Problem:
    """By who must act: the client (400), nobody but time (503, 504), the operator (500, 502)."""
    message = str(error)
    if isinstance(error, InvalidArgument):
        return Problem(400, "invalid_request_error", message)
    if isinstance(error, DeadlineExceeded):
        return Problem(504, "timeout_error", message, retry_after_s=1)
    if isinstance(error, Retry):
        return Problem(503, "service_unavailable_error", message, retry_after_s=1)
    if isinstance(error, Denied):
        return Problem(502, "api_error", f"the master does not let this router in: {message}")
    return Problem(500, "api_error", message)


def refusal_problem(refusal: Refusal) -> Problem:
    """The scheduler would not take the request: 429, or 503 where there is nothing to send it to."""
    details = (("reason", refusal.reason.value), ("value", refusal.value), ("limit", refusal.limit))
    if refusal.reason is Reason.NO_INSTANCE:
        return Problem(503, "service_unavailable_error", "no engine is there to take it", "no_instance", 1, details)
    unit = UNITS[refusal.reason]
    message = (
        f"rejected by the scheduler: {refusal.reason.value} would be {refusal.value:.4g} {unit}, the limit is {refusal.limit:.4g} {unit}"
    )
    return Problem(429, "rate_limit_error", message, refusal.reason.value, _retry_after_s(refusal), details)


def _retry_after_s(refusal: Refusal) -> int:
    """How long until the queue is short enough, if nothing is added to it; a second where nobody can tell."""
    over_s = refusal.value - refusal.limit if refusal.reason in (Reason.TTFT, Reason.PREFILL_LOAD) else 0.0
    return max(1, math.ceil(min(over_s, MAX_RETRY_AFTER_S)))
