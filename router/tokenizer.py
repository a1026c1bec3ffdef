"""Token ids of prompts: from the request itself, or from the engine's /tokenize, cached and verified against `usage` of responses.

The scheduler finds a prefix by its tokens, so they must be exactly the engine's. A request that cannot be tokenised exactly is routed by
load. Runs in one event loop.

Source: vLLM 0.32, entrypoints/serve/tokenize; SGLang 0.5.23, entrypoints/openai/serving_tokenize.py. Both take the messages, tools and
template arguments of a chat request.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final

from kvstore.kvcache.key_names import Naming
from kvstore.protocol.errors import KVStoreError, Unavailable
from kvstore.router.engines import Engines
from kvstore.router.metrics import RouterCounters
from kvstore.router.openai_api import CHAT, COMPLETIONS, ApiRequest, has_several_prompts, is_token

CHARACTERS_PER_TOKEN: Final = 4
"""For estimates; typical of English text."""
NOT_RENDERED: Final = frozenset(
    ("stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "user", "metadata", "store", "priority")
    + ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logit_bias")
    + ("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "prompt_logprobs", "cache_salt")
    + ("kv_transfer_params", "request_id", "session_id", "return_token_ids", "return_tokens_as_token_ids", "service_tier", "echo")
    + ("add_generation_prompt",)
)
"""Members that do not change the prompt, and are left out of the cache's key."""
UNKNOWN_TO_TOKENIZE: Final = ("documents", "reasoning_effort", "truncate_prompt_tokens", "prompt_embeds", "suffix")
"""Members that change the prompt and that not every engine's /tokenize supports."""
MAX_CACHED_KEYS: Final = 1 << 17
"""Most keys of all cached prompts: about 10 MB."""
MAX_ADDRESSES: Final = 64
"""Most engines remembered for /tokenize."""
ATTEMPTS: Final = 2
"""Engines tried for the tokens of one prompt."""
log = logging.getLogger("kvstore.router")


class LoadReason(StrEnum):
    """Why a request is routed by load."""

    API = "api"
    """Embeddings and responses: engines do not tokenise their input separately."""
    CONTENT = "content"
    """An image, audio or file in a message: block keys depend on more than tokens."""
    MEMBER = "member"
    """A member changes the prompt in a way that /tokenize does not support."""
    SALT = "salt"
    """`cache_salt`: block keys depend on it."""
    SEVERAL_PROMPTS = "several_prompts"
    NO_ENGINE = "no_engine"
    """The router has not used any engine yet."""
    TOKENIZE = "tokenize"
    """/tokenize is missing, failed, refused the prompt or timed out."""
    MISMATCH = "mismatch"
    """`usage.prompt_tokens` of a response differed from /tokenize: exact tokenisation is off."""


def prompt_source(request: ApiRequest) -> list[int] | bytes | LoadReason:
    """Return the request's own token ids, or the body for an engine's /tokenize, or the reason for neither."""
    members = request.members
    if request.path not in (CHAT, COMPLETIONS):
        return LoadReason.API
    if members.get("cache_salt") is not None:
        return LoadReason.SALT
    # SGLang's chat ignores add_generation_prompt, its /tokenize does not.
    if members.get("add_generation_prompt") not in (None, True) or any(members.get(name) is not None for name in UNKNOWN_TO_TOKENIZE):
        return LoadReason.MEMBER
    return _of_chat(members) if request.path == CHAT else _of_completion(members)


def estimate_tokens(members: Mapping[str, Any]) -> int:
    """Estimate the tokens of the prompt from its characters, without data URLs. At least 1."""
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
    """Set both names: vLLM renames `reasoning_content` in a chat but not in /tokenize; SGLang reads only that name."""
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
    """Return whether a message's content is text only, or empty (as with tool calls)."""
    if not isinstance(content, list):
        return isinstance(content, str | None)
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content)


def _characters(values: list[Any]) -> Iterator[int]:
    """Yield the lengths of all strings within; a number counts as a token. Iterative, because the JSON may be deeply nested."""
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


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token count and block keys of a prompt, for the scheduler."""

    tokens: int
    """An estimate if `load_reason` is set."""
    keys: Sequence[bytes] = ()
    """Of the full blocks."""
    load_reason: LoadReason | None = None
    """Reason for routing by load; None: routed by prefix."""
    is_by_engine: bool = False
    """The tokens come from an engine's /tokenize."""


class PromptTokenizer:
    """Computes the tokens and block keys of prompts. The caller closes engines and threads."""

    def __init__(self, engines: Engines, naming: Naming, threads: Executor, counters: RouterCounters) -> None:
        """`threads` compute the hashes: those of a long prompt would delay all streams of the event loop."""
        self._engines = engines
        self._naming = naming
        self._threads = threads
        self._counters = counters
        self._cache = PromptCache(MAX_CACHED_KEYS)
        self._addresses: OrderedDict[str, None] = OrderedDict()
        """Engines for /tokenize, the next one first."""
        self._is_exact = True

    def learn(self, address: str) -> None:
        """Remember an engine that serves the model."""
        self._addresses[address] = None
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)

    async def prompt(self, request: ApiRequest) -> TokenizedPrompt:
        """Tokenise the prompt of a request. Does not raise: a prompt without exact tokens has a `load_reason`, which is counted."""
        source = prompt_source(request)
        if isinstance(source, list):
            return await self._named(source)
        prompt = await self._by_engine(source, request) if isinstance(source, bytes) else source
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        self._counters.routed_by_load[prompt.value] += 1
        return TokenizedPrompt(estimate_tokens(request.members), load_reason=prompt)

    def verify(self, prompt: TokenizedPrompt, prompt_tokens: int | None) -> None:
        """Compare the count of /tokenize with a response's `usage.prompt_tokens`. A mismatch turns exact tokenisation off."""
        if not prompt.is_by_engine or prompt_tokens is None or prompt_tokens == prompt.tokens:
            return
        self._counters.token_mismatches += 1
        if self._is_exact:
            log.warning(
                "an engine counted %d tokens in a prompt for which its /tokenize returned %d: requests are routed by load until the router"
                " is restarted; token ids in /v1/completions are still routed by prefix",
                prompt_tokens,
                prompt.tokens,
            )
        self._is_exact = False

    async def _by_engine(self, body: bytes, request: ApiRequest) -> TokenizedPrompt | LoadReason:
        if not self._is_exact:
            return LoadReason.MISMATCH
        digest = sha256(body).digest()
        if found := self._cache.get(digest):
            return found
        if not self._addresses:
            return LoadReason.NO_ENGINE
        for _ in range(ATTEMPTS):
            try:
                tokens = await self._engines.tokenize(self._next_address(), body, request.headers)
            except Unavailable:
                continue
            except KVStoreError:  # the prompt was refused, as the request will be, or a timeout: no retry
                break
            prompt = await self._named(tokens, is_by_engine=True)
            self._cache.put(digest, prompt)
            return prompt
        return LoadReason.TOKENIZE

    def _next_address(self) -> str:
        address = next(iter(self._addresses))
        self._addresses.move_to_end(address)
        return address

    async def _named(self, tokens: list[int], *, is_by_engine: bool = False) -> TokenizedPrompt:
        keys = await asyncio.get_running_loop().run_in_executor(self._threads, self._naming.block_keys, tokens)
        return TokenizedPrompt(len(tokens), keys, is_by_engine=is_by_engine)


class PromptCache:
    """LRU cache: digest of the request -> prompt. Bounded by the number of keys."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._prompts: OrderedDict[bytes, TokenizedPrompt] = OrderedDict()
        self._size_keys = 0

    def get(self, digest: bytes) -> TokenizedPrompt | None:
        prompt = self._prompts.get(digest)
        if prompt is not None:
            self._prompts.move_to_end(digest)
        return prompt

    def put(self, digest: bytes, prompt: TokenizedPrompt) -> None:
        """Add a prompt. Its cost is one plus its number of blocks."""
        if digest in self._prompts:
            return
        self._prompts[digest] = prompt
        self._size_keys += 1 + len(prompt.keys)
        while self._size_keys > self._max_keys:
            _, evicted = self._prompts.popitem(last=False)
            self._size_keys -= 1 + len(evicted.keys)
