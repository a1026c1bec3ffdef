"""OpenAI's API: parsing of clients' requests, and the router's own errors in its form. Sans-I/O.

The router reads few members of a body: the model, the limit of output tokens, and those that decide whether a request can be split into
prefill and decode. Engines get the body unchanged, unknown members included.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.client.instances.client import Refusal
from kvstore.protocol.errors import DeadlineExceeded, Denied, InvalidArgument, KVStoreError, Retry
from kvstore.scheduler.request import Reason, Slo

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
OUTPUT_LIMITS: Final[Mapping[str, tuple[str, ...]]] = {
    COMPLETIONS: ("max_tokens",),
    CHAT: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
    EMBEDDINGS: (),
}
"""Path -> members that limit the output, of which the first present one counts. Its keys are the paths that are served."""
SPLITTABLE_PATHS: Final = frozenset({COMPLETIONS, CHAT})
SPLITTABLE_ONLY_AS: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
}
"""Values of members that allow a split. With other values one engine must serve the whole request."""
TRANSFER_PARAMS: Final = "kv_transfer_params"
"""Member for vLLM's KV connector. A client's own one keeps a request together, unless it has nothing but hints."""
RETENTION: Final = "retention"
"""Member of `kv_transfer_params` with retention hints, which kvstore's connector reads."""
PASSED_HEADERS: Final = ("authorization", "x-request-id")
"""Headers of the client that are sent to the engine."""
MAX_TOKEN_ID: Final = (1 << 31) - 1
"""Keys are hashes over 32-bit ids."""
TTFT_HEADER: Final = "x-kvstore-ttft-slo-s"
TBT_HEADER: Final = "x-kvstore-tbt-slo-s"
MAX_RETRY_AFTER_S: Final = 60
"""Estimates of longer times are not reliable."""
UNITS: Final = {Reason.TTFT: "s", Reason.TBT: "s", Reason.CAPACITY: "tokens", Reason.PREFILL_LOAD: "s", Reason.DECODE_LOAD: "s"}
"""Unit of a rejection's value and limit. A load is the expected time to first token or between tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """Parsed request of a client."""

    path: str
    body: bytes
    """JSON object as the client sent it."""
    members: Mapping[str, Any]
    """The parsed body."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers for the engine."""
    retention: Mapping[str, Any] | None = None
    """Retention hints of the client's header."""

    @property
    def model(self) -> str | None:
        """Name of the model, or None. Raises InvalidArgument if it is not a string."""
        model = self.members.get("model")
        if not isinstance(model, str | None):
            raise InvalidArgument("model must be a string, the name of the model")
        return model

    @property
    def is_streamed(self) -> bool:
        return bool(self.members.get("stream"))

    @property
    def max_output_tokens(self) -> int | None:
        """The client's limit; None without one, or for an invalid one, which the engine reports."""
        for name in OUTPUT_LIMITS[self.path]:
            value = self.members.get(name)
            if value is not None:
                return value if isinstance(value, int) and value > 0 else None
        return None

    @property
    def is_splittable(self) -> bool:
        """True if one engine can prefill and another one decode."""
        if self.path not in SPLITTABLE_PATHS or has_several_prompts(self.members):
            return False
        theirs = self.members.get(TRANSFER_PARAMS)
        if theirs is not None and not (isinstance(theirs, dict) and theirs.keys() == {RETENTION}):
            return False
        return all(self.members.get(name) in values for name, values in SPLITTABLE_ONLY_AS.items())

    @property
    def hints(self) -> Mapping[str, Any]:
        """Retention hints as a member of `kv_transfer_params`: those of the header, else the client's own; {} without
        any."""
        theirs = self.members.get(TRANSFER_PARAMS)
        if self.retention is not None:
            return {RETENTION: self.retention}
        return {RETENTION: theirs[RETENTION]} if isinstance(theirs, dict) and RETENTION in theirs else {}

    @property
    def previous_response_id(self) -> str | None:
        """In /v1/responses: the response that this request continues, kept by one engine."""
        value = self.members.get("previous_response_id") if self.path == RESPONSES else None
        return value if isinstance(value, str) else None


def parse_request(path: str, body: bytes, headers: Mapping[str, str]) -> ApiRequest:
    """Parse a request. Raises InvalidArgument unless the body is a JSON object."""
    passed = {name: headers[name] for name in PASSED_HEADERS if name in headers}
    return ApiRequest(path=path, body=body, members=parse_json(body), headers=passed)


def parse_json(body: bytes) -> Mapping[str, Any]:
    """Parse a body. Raises InvalidArgument unless it is a JSON object in UTF-8."""
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("the body is not a JSON object")
    return value


def has_several_prompts(members: Mapping[str, Any]) -> bool:
    """Return whether a completion request has a list of two or more prompts."""
    prompt = members.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def prefill_body(request: ApiRequest, params: Mapping[str, Any]) -> bytes:
    """Return the body for the prefill engine: one output token, not streamed, with `params` and the hints as
    `kv_transfer_params`."""
    ours: dict[str, Any] = {"max_tokens": 1, "stream": False, TRANSFER_PARAMS: {**params, **request.hints}}
    if request.path == CHAT:
        ours["max_completion_tokens"] = 1
    # Engines refuse stream_options without a stream, and min_tokens above max_tokens.
    theirs = {name: value for name, value in request.members.items() if name not in ("stream_options", "min_tokens")}
    return json.dumps({**theirs, **ours}).encode()


def decode_body(request: ApiRequest, params: Mapping[str, Any]) -> bytes:
    """Return the client's body with `params` and the hints as `kv_transfer_params`."""
    return _with_transfer_params(request, {**params, **request.hints})


def whole_body(request: ApiRequest) -> bytes:
    """Return the body for an engine that serves the whole request: the client's, with the hints of its header."""
    theirs = request.members.get(TRANSFER_PARAMS)
    if request.retention is None or request.path == EMBEDDINGS or not isinstance(theirs, dict | None):
        return request.body
    return _with_transfer_params(request, {**(theirs or {}), **request.hints})


def _with_transfer_params(request: ApiRequest, params: Mapping[str, Any]) -> bytes:
    """Return the client's body with `params` appended as `kv_transfer_params`.

    JSON parsers use the last member of a name, so it overrides that of the client.
    """
    members = request.body[: request.body.rindex(b"}")]
    separator = b", " if request.members else b""
    return members + separator + json.dumps(TRANSFER_PARAMS).encode() + b": " + json.dumps(params).encode() + b"}"


def parse_slo(headers: Mapping[str, str], default: Slo) -> Slo:
    """Return the SLO of the headers, or `default`. Raises InvalidArgument unless values are positive numbers of seconds."""
    return Slo(
        ttft_s=_seconds(headers, TTFT_HEADER, default.ttft_s),
        tbt_s=_seconds(headers, TBT_HEADER, default.tbt_s),
    )


def _seconds(headers: Mapping[str, str], name: str, default: float) -> float:
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidArgument(f"the header {name} must be a positive number of seconds, not {text!r}")
    return value


@dataclass(frozen=True, slots=True)
class ApiProblem:
    """An error response: HTTP status and the error object of the body."""

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


def problem_of(error: KVStoreError) -> ApiProblem:
    """Map an error to a response: 400 for the client's errors, 503 and 504 to retry later, 500 and 502 for the operator."""
    message = str(error)
    if isinstance(error, InvalidArgument):
        return ApiProblem(400, "invalid_request_error", message)
    if isinstance(error, DeadlineExceeded):
        return ApiProblem(504, "timeout_error", message, retry_after_s=1)
    if isinstance(error, Retry):
        return ApiProblem(503, "service_unavailable_error", message, retry_after_s=1)
    if isinstance(error, Denied):
        return ApiProblem(502, "api_error", f"the master refused the router's credentials: {message}")
    return ApiProblem(500, "api_error", message)


def refusal_problem(refusal: Refusal) -> ApiProblem:
    """Map the scheduler's refusal to a response: 429, or 503 if there is no instance."""
    details = (("reason", refusal.reason.value), ("value", refusal.value), ("limit", refusal.limit))
    if refusal.reason is Reason.NO_INSTANCE:
        return ApiProblem(503, "service_unavailable_error", "no engine is available for the request", "no_instance", 1, details)
    unit = UNITS[refusal.reason]
    message = (
        f"rejected by the scheduler: {refusal.reason.value} would be {refusal.value:.4g} {unit}, the limit is {refusal.limit:.4g} {unit}"
    )
    return ApiProblem(429, "rate_limit_error", message, refusal.reason.value, _retry_after_s(refusal), details)


def _retry_after_s(refusal: Refusal) -> int:
    """Seconds until the queue is short enough, if no request is added; 1 if unknown."""
    over_s = refusal.value - refusal.limit if refusal.reason in (Reason.TTFT, Reason.PREFILL_LOAD) else 0.0
    return max(1, math.ceil(min(over_s, MAX_RETRY_AFTER_S)))


def is_token(value: Any) -> bool:
    """Return whether a JSON value is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID
