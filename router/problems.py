"""Errors of the router itself, in the form of OpenAI's API. Sans-I/O."""

import math
from dataclasses import dataclass
from typing import Any, Final

from kvstore.client.instances.client import Refusal
from kvstore.protocol.errors import DeadlineExceeded, Denied, InvalidArgument, KVStoreError, Retry
from kvstore.scheduler.request import Reason

MAX_RETRY_AFTER_S: Final = 60
"""What was foreseen beyond that will have changed by then."""
UNITS: Final = {Reason.TTFT: "s", Reason.TBT: "s", Reason.CAPACITY: "tokens", Reason.PREFILL_LOAD: "s", Reason.DECODE_LOAD: "s"}
"""Of a rejection's value and limit: a load is a time to first token or between tokens, as foreseen."""


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
