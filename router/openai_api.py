"""OpenAI's API: requests of clients, and errors of the router itself in its form. Sans-I/O.

The router reads few members of a body: the model, the limit of output tokens, and the members that decide whether two engines can share
the work. The engine gets the body unchanged, unknown members included."""

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
"""Members that limit the output, the first one present counts; also the list of paths that are served."""
SPLITTABLE_PATHS: Final = frozenset({COMPLETIONS, CHAT})
SPLITTABLE_ONLY_AS: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "kv_transfer_params": (None,),
}
"""Members with another value than these need the whole request in one engine."""
PASSED_HEADERS: Final = ("authorization", "x-request-id")
"""Headers of the client that go to the engine."""
MAX_TOKEN_ID: Final = (1 << 31) - 1
"""Keys are made of 32-bit ids."""
TTFT_HEADER: Final = "x-kvstore-ttft-slo-s"
TBT_HEADER: Final = "x-kvstore-tbt-slo-s"
MAX_RETRY_AFTER_S: Final = 60
"""What was foreseen beyond that will have changed by then."""
UNITS: Final = {Reason.TTFT: "s", Reason.TBT: "s", Reason.CAPACITY: "tokens", Reason.PREFILL_LOAD: "s", Reason.DECODE_LOAD: "s"}
"""Of a rejection's value and limit: a load is a time to first token or between tokens, as foreseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """One request of a client."""

    path: str
    body: bytes
    """As the client sent it: a JSON object."""
    members: Mapping[str, Any]
    """Of the body."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """For the engine."""

    @property
    def model(self) -> str | None:
        """None: the client names none. Raises InvalidArgument: it is no text."""
        model = self.members.get("model")
        if not isinstance(model, str | None):
            raise InvalidArgument("model is a text: the name of the model")
        return model

    @property
    def is_streamed(self) -> bool:
        return bool(self.members.get("stream"))

    @property
    def max_output_tokens(self) -> int | None:
        """None: the client sets no limit, or the engine has to judge what it set."""
        for name in OUTPUT_LIMITS[self.path]:
            value = self.members.get(name)
            if value is not None:
                return value if isinstance(value, int) and value > 0 else None
        return None

    @property
    def is_splittable(self) -> bool:
        """Whether one engine can compute the prompt and another one decode."""
        if self.path not in SPLITTABLE_PATHS or has_several_prompts(self.members):
            return False
        return all(self.members.get(name) in values for name, values in SPLITTABLE_ONLY_AS.items())

    @property
    def previous_response_id(self) -> str | None:
        """Of /v1/responses: the response that this one continues, which one engine keeps."""
        value = self.members.get("previous_response_id") if self.path == RESPONSES else None
        return value if isinstance(value, str) else None


def parse_request(path: str, body: bytes, headers: Mapping[str, str]) -> ApiRequest:
    """Raises InvalidArgument unless the body is one JSON object."""
    passed = {name: headers[name] for name in PASSED_HEADERS if name in headers}
    return ApiRequest(path=path, body=body, members=parse_json(body), headers=passed)


def parse_json(body: bytes) -> Mapping[str, Any]:
    """Raises InvalidArgument unless the body is one JSON object, in UTF-8."""
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("the body is not a JSON object")
    return value


def has_several_prompts(members: Mapping[str, Any]) -> bool:
    """Whether a completion request holds a list of two prompts or more."""
    prompt = members.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def prefill_body(request: ApiRequest, params: Mapping[str, Any]) -> bytes:
    """The body for the engine that computes the prompt: one token, in one piece, and `params` as `kv_transfer_params`."""
    ours: dict[str, Any] = {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
    if request.path == CHAT:
        ours["max_completion_tokens"] = 1
    # An engine refuses both beside ours: stream_options without a stream, and more tokens at least than at most.
    theirs = {name: value for name, value in request.members.items() if name not in ("stream_options", "min_tokens")}
    return json.dumps({**theirs, **ours}).encode()


def decode_body(request: ApiRequest, params: Mapping[str, Any]) -> bytes:
    """The client's bytes, with `params` as `kv_transfer_params` after the last member: the last one of a name counts, and the client's may
    be null."""
    members = request.body[: request.body.rindex(b"}")]
    separator = b", " if request.members else b""
    return members + separator + b'"kv_transfer_params": ' + json.dumps(params).encode() + b"}"


def parse_slo(headers: Mapping[str, str], default: Slo) -> Slo:
    """`default`, where the headers do not set another one. Raises InvalidArgument for what is no number of seconds above 0."""
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
        raise InvalidArgument(f"the header {name} is a number of seconds above 0, not {text!r}")
    return value


@dataclass(frozen=True, slots=True)
class ApiProblem:
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


def problem_of(error: KVStoreError) -> ApiProblem:
    """By who must act: the client (400), nobody but time (503, 504), the operator (500, 502)."""
    message = str(error)
    if isinstance(error, InvalidArgument):
        return ApiProblem(400, "invalid_request_error", message)
    if isinstance(error, DeadlineExceeded):
        return ApiProblem(504, "timeout_error", message, retry_after_s=1)
    if isinstance(error, Retry):
        return ApiProblem(503, "service_unavailable_error", message, retry_after_s=1)
    if isinstance(error, Denied):
        return ApiProblem(502, "api_error", f"the master does not let this router in: {message}")
    return ApiProblem(500, "api_error", message)


def refusal_problem(refusal: Refusal) -> ApiProblem:
    """The scheduler would not take the request: 429, or 503 where there is nothing to send it to."""
    details = (("reason", refusal.reason.value), ("value", refusal.value), ("limit", refusal.limit))
    if refusal.reason is Reason.NO_INSTANCE:
        return ApiProblem(503, "service_unavailable_error", "no engine is there to take it", "no_instance", 1, details)
    unit = UNITS[refusal.reason]
    message = (
        f"rejected by the scheduler: {refusal.reason.value} would be {refusal.value:.4g} {unit}, the limit is {refusal.limit:.4g} {unit}"
    )
    return ApiProblem(429, "rate_limit_error", message, refusal.reason.value, _retry_after_s(refusal), details)


def _retry_after_s(refusal: Refusal) -> int:
    """How long until the queue is short enough, if nothing is added to it; a second where nobody can tell."""
    over_s = refusal.value - refusal.limit if refusal.reason in (Reason.TTFT, Reason.PREFILL_LOAD) else 0.0
    return max(1, math.ceil(min(over_s, MAX_RETRY_AFTER_S)))


def is_token(value: Any) -> bool:
    """Whether a value of JSON is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID
