"""Tokens of prompts as the engine makes them: from the request itself, or the engine's /tokenize, cached and checked against its answers.

The scheduler finds a prefix by its tokens, so only the engine's own tokens are of use. A request that cannot be tokenised exactly is
routed by load; its prompt is never changed to make it fit. Of one event loop.

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

from kvstore.kvcache.naming import Naming
from kvstore.protocol.errors import KVStoreError, Unavailable
from kvstore.router.engines import Engines
from kvstore.router.metrics import RouterCounters
from kvstore.router.openai_api import CHAT, COMPLETIONS, ApiRequest, has_several_prompts, is_token

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
MAX_CACHED_KEYS: Final = 1 << 17
"""Of all prompts in the cache together: about 10 MB."""
MAX_ADDRESSES: Final = 64
"""Engines that are remembered to be asked."""
ATTEMPTS: Final = 2
"""Engines that one prompt is sent to for its tokens."""
log = logging.getLogger("kvstore.router")


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


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the scheduler sees it."""

    tokens: int
    """Estimated where there is a `load_reason`."""
    keys: Sequence[bytes] = ()
    """Of its full blocks."""
    load_reason: LoadReason | None = None
    """Why it is routed by load; None: by its prefix."""
    is_by_engine: bool = False
    """An engine's /tokenize counted the tokens."""


class PromptTokenizer:
    """Counts and names the blocks of prompts. Whoever made the parts closes them."""

    def __init__(self, engines: Engines, naming: Naming, threads: Executor, counters: RouterCounters) -> None:
        """`threads`: for the hashes, as those of a long prompt would hold up all streams."""
        self._engines = engines
        self._naming = naming
        self._threads = threads
        self._counters = counters
        self._cache = PromptCache(MAX_CACHED_KEYS)
        self._addresses: OrderedDict[str, None] = OrderedDict()
        """The one to be asked next is first."""
        self._is_exact = True

    def learn(self, address: str) -> None:
        """An engine at `address` serves the model."""
        self._addresses[address] = None
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)

    async def prompt(self, request: ApiRequest) -> TokenizedPrompt:
        """The prompt of a request. Never fails: what cannot be tokenised exactly has a `load_reason`, which is counted."""
        source = prompt_source(request)
        if isinstance(source, list):
            return await self._named(source)
        prompt = await self._by_engine(source, request) if isinstance(source, bytes) else source
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        self._counters.routed_by_load[prompt.value] += 1
        return TokenizedPrompt(estimate_tokens(request.members), load_reason=prompt)

    def verify(self, prompt: TokenizedPrompt, prompt_tokens: int | None) -> None:
        """Compare an engine's count with an answer's `usage.prompt_tokens`: a mismatch turns exact tokenising off."""
        if not prompt.is_by_engine or prompt_tokens is None or prompt_tokens == prompt.tokens:
            return
        self._counters.token_mismatches += 1
        if self._is_exact:
            log.warning(
                "the engine counts %d tokens in a prompt for which its /tokenize gave %d: requests are routed by load until the router"
                " starts again; token ids in /v1/completions still find their prefix",
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
            except KVStoreError:  # it refuses the prompt, as it will the request, or takes too long
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
    """Prompts by the digest of the whole request, the least recently used of which leave first."""

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
        """A prompt counts as one key more than it has blocks."""
        if digest in self._prompts:
            return
        self._prompts[digest] = prompt
        self._size_keys += 1 + len(prompt.keys)
        while self._size_keys > self._max_keys:
            _, evicted = self._prompts.popitem(last=False)
            self._size_keys -= 1 + len(evicted.keys)
