"""Source of the tokens of a request's prompt: the request itself, the engine's /tokenize, or none. Sans-I/O.

The scheduler finds a prefix by its tokens, so only the engine's own tokens are of use. A request that cannot be tokenised exactly is
routed by load; its prompt is never changed to make it fit.

Source: vLLM 0.32, entrypoints/serve/tokenize; SGLang 0.5.23, entrypoints/openai/serving_tokenize.py. Both take the messages, tools and
template arguments of a chat request.
"""

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

from kvstore.router.requests import CHAT, COMPLETIONS, ApiRequest, has_several_prompts

MAX_TOKEN_ID: Final = (1 << 31) - 1
"""Keys are made of 32-bit ids."""
CHARACTERS_PER_TOKEN: Final = 4
"""Of an estimate: usual for English text."""
NOT_RENDERED: Final = frozenset(
    ("stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "user", "metadata", "store", "priority")
    + ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logit_bias")
    + ("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "prompt_logprobs", "cache_salt")
    + ("kv_transfer_params", "request_id", "session_id", "return_token_ids", "return_tokens_as_token_ids", "service_tier", "echo")
    + ("add_generation_prompt",)
)
"""Members that change no prompt: the same prompt with others of them is one entry of the cache."""
UNKNOWN_TO_TOKENIZE: Final = ("documents", "reasoning_effort", "truncate_prompt_tokens", "prompt_embeds", "suffix")
"""Members that change the prompt, and that an engine's /tokenize does not take, or not every engine's."""


class LoadReason(StrEnum):
    """Why a request is routed by load."""

    API = "api"
    """Embeddings and responses: no engine tokenises their input by itself."""
    CONTENT = "content"
    """An image, audio or a file in a message: its blocks depend on more than tokens."""
    MEMBER = "member"
    """A member changes the prompt in a way that /tokenize does not know."""
    SALT = "salt"
    """`cache_salt`: the blocks' names depend on it."""
    SEVERAL_PROMPTS = "several_prompts"
    NO_ENGINE = "no_engine"
    """The router has not sent a request to any engine so far."""
    TOKENIZE = "tokenize"
    """/tokenize is missing, failed, refused the prompt or took too long."""
    MISMATCH = "mismatch"
    """An answer's `usage.prompt_tokens` differed from /tokenize: exact tokenising is off."""


def prompt_source(request: ApiRequest) -> list[int] | bytes | LoadReason:
    """The prompt's token ids where the request has them, else the body for an engine's /tokenize, else why there is neither."""
    members = request.members
    if request.path not in (CHAT, COMPLETIONS):
        return LoadReason.API
    if members.get("cache_salt") is not None:
        return LoadReason.SALT
    # SGLang's chat ignores it, and its /tokenize does not.
    if members.get("add_generation_prompt") not in (None, True) or any(members.get(name) is not None for name in UNKNOWN_TO_TOKENIZE):
        return LoadReason.MEMBER
    return _of_chat(members) if request.path == CHAT else _of_completion(members)


def estimate_tokens(members: Mapping[str, Any]) -> int:
    """About how many tokens the prompt has, by its characters; data URLs do not count. At least 1."""
    parts = [members.get(name) for name in ("prompt", "messages", "input", "instructions", "tools")]
    characters = sum(_characters(parts))
    return max(1, characters // CHARACTERS_PER_TOKEN)


def _of_chat(members: Mapping[str, Any]) -> bytes | LoadReason:
    messages = members.get("messages")
    if not isinstance(messages, list):
        return LoadReason.TOKENIZE
    for message in messages:
        if not isinstance(message, dict):
            return LoadReason.TOKENIZE
        if not _is_text(message.get("content")):
            return LoadReason.CONTENT
    rendered = {name: value for name, value in members.items() if name not in NOT_RENDERED}
    return _body({**rendered, "messages": [_with_reasoning(message) for message in messages]})


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Under both names: vLLM renames `reasoning_content` in a chat, and not in /tokenize; SGLang reads that name only."""
    content = message.get("reasoning_content")
    return message if content is None or message.get("reasoning") is not None else {**message, "reasoning": content}


def _of_completion(members: Mapping[str, Any]) -> list[int] | bytes | LoadReason:
    prompt = members.get("prompt")
    if has_several_prompts(members):
        return LoadReason.SEVERAL_PROMPTS
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        passed = {name: members[name] for name in ("model", "add_special_tokens") if name in members}
        return _body({"prompt": prompt, **passed})
    if isinstance(prompt, list) and prompt and all(is_token(token) for token in prompt):
        return prompt
    return LoadReason.TOKENIZE


def _body(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members).encode()


def _is_text(content: Any) -> bool:
    """Whether a message's content is text alone, or nothing, as beside tool calls."""
    if not isinstance(content, list):
        return isinstance(content, str | None)
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content)


def is_token(value: Any) -> bool:
    """Whether a value of JSON is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _characters(values: list[Any]) -> Iterator[int]:
    """Of all texts within; a number, as a token's, is as long as a token. JSON nests as deep as the parser of the body took."""
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield 0 if value.startswith("data:") else len(value)
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif value is not None:
            yield CHARACTERS_PER_TOKEN
