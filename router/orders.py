"""What a client asks for, read from the JSON of /v1/completions or /v1/chat/completions. Sans-I/O.

A request is served as two, prefill and decode, so members that cannot be kept over that seam (guided output, log probabilities) or
that need more than one sequence are refused, not ignored; unknown ones too.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from kvstore.protocol.errors import InvalidArgument
from kvstore.router.templates import chat_prompt
from kvstore.scheduler.request import Slo

SAMPLING: Final = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos")
    + ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
)
"""Members that go on to the engines as they are."""
IGNORED: Final = frozenset({"user", "metadata"})
"""Members that change no answer."""
ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
}
"""Members of which only these values are served: one plain answer."""
COMPLETION: Final = frozenset({"model", "prompt", "max_tokens", "stream", "stream_options"})
CHAT: Final = frozenset({"model", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options"})
MAX_TOKEN_ID: Final = (1 << 31) - 1
"""Keys are made of 32-bit ids."""
TTFT_HEADER: Final = "x-kvstore-ttft-slo-s"
TBT_HEADER: Final = "x-kvstore-tbt-slo-s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request of a client, well-formed. It may still be for another model, or too long."""

    model: str
    prompt: str | list[int]
    max_tokens: int | None
    """None: not said."""
    is_chat: bool = False
    stream: bool = False
    include_usage: bool = False
    """Of a stream: its last event before [DONE] says how many tokens there were."""
    sampling: Mapping[str, Any]


def parse_json(body: bytes) -> Mapping[str, Any]:
    """Raises InvalidArgument unless the body is one JSON object, with finite numbers."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("the body is not a JSON object")
    return value


def parse_completion(body: Mapping[str, Any]) -> Order:
    """The order of POST /v1/completions. Raises InvalidArgument naming the member."""
    _check_members(body, COMPLETION)
    return _order(body, _prompt(body.get("prompt")), body.get("max_tokens"), is_chat=False)


def parse_chat(body: Mapping[str, Any]) -> Order:
    """The order of POST /v1/chat/completions. Raises InvalidArgument naming the member."""
    _check_members(body, CHAT)
    max_tokens = body.get("max_completion_tokens")
    return _order(body, chat_prompt(body.get("messages")), body.get("max_tokens") if max_tokens is None else max_tokens, is_chat=True)


def parse_slo(headers: Mapping[str, str], default: Slo) -> Slo:
    """`default`, where the headers do not say otherwise. Raises InvalidArgument for what is no number of seconds above 0."""
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


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text[:50]} is not a finite number")


def _finite(text: str) -> float:
    """1e999 is well-formed, and infinity for Python, which would send it to engines as Infinity."""
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


def _check_members(body: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known or name in IGNORED:
            continue
        if name in SAMPLING:
            if not _is_flat(value):  # engines would refuse it, and what is nested deep enough to be read cannot be written again
                raise InvalidArgument(f"{name} has a list or an object within another: engines know none")
            continue
        if name not in ONLY:
            raise InvalidArgument(f"unknown member {name!r}")
        if not _is_flat(value) or json.dumps(value) not in map(json.dumps, ONLY[name]):
            raise InvalidArgument(f"{name} is served only as {json.dumps(ONLY[name][-1])}: a request gets one plain answer")


def _order(body: Mapping[str, Any], prompt: str | list[int], max_tokens: Any, *, is_chat: bool) -> Order:
    model, stream = body.get("model"), body.get("stream")
    if not isinstance(model, str):
        raise InvalidArgument("model is a text")
    if not isinstance(stream, bool | None):
        raise InvalidArgument("stream is true or false")
    if max_tokens is not None and (not _is_integer(max_tokens) or max_tokens < 1):
        raise InvalidArgument(f"max_tokens is a whole number of at least 1, not {_shown(max_tokens)}")
    return Order(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        is_chat=is_chat,
        stream=bool(stream),
        include_usage=_include_usage(body.get("stream_options")),
        sampling={name: value for name, value in body.items() if name in SAMPLING and value is not None},
    )


def _include_usage(options: Any) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict) or set(options) - {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
        raise InvalidArgument('stream_options is {"include_usage": true or false}')
    return bool(options.get("include_usage"))


def _prompt(prompt: Any) -> str | list[int]:
    """A text, ids, or a list of one of these."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidArgument(f"prompt has {len(prompt)} prompts: send each in a request of its own")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(_is_integer(token) and 0 <= token <= MAX_TOKEN_ID for token in prompt):
        raise InvalidArgument(f"prompt is a text or a list of token ids from 0 to {MAX_TOKEN_ID}")
    return prompt


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flat(value: Any) -> bool:
    """A plain value, or a list or an object of such."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(item, list | dict) for item in items)


def _shown(value: Any) -> str:
    return json.dumps(value)[:50] if _is_flat(value) else "something nested"
