"""Tokens of prompts as the engine makes them: its /tokenize, remembered by the whole request and checked against its answers.

Of one event loop.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from kvstore.kvcache.naming import Naming
from kvstore.protocol.errors import KVStoreError, Unavailable
from kvstore.router.counters import Counters
from kvstore.router.engines import Engines
from kvstore.router.prompt_source import LoadReason, estimate_tokens, prompt_source
from kvstore.router.requests import ApiRequest

MAX_CACHED_KEYS: Final = 1 << 17
"""Of all prompts in the cache together: about 10 MB."""
MAX_ADDRESSES: Final = 64
"""Engines that are remembered to be asked."""
ATTEMPTS: Final = 2
"""Engines that one prompt is sent to for its tokens."""

log = logging.getLogger("kvstore.router")


@dataclass(frozen=True, slots=True)
class Prompt:
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

    def __init__(self, engines: Engines, naming: Naming, threads: Executor, counters: Counters) -> None:
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

    async def prompt(self, request: ApiRequest) -> Prompt:
        """The prompt of a request. Never fails: what cannot be tokenised exactly has a `load_reason`, which is counted."""
        source = prompt_source(request)
        if isinstance(source, list):
            return await self._named(source)
        prompt = await self._by_engine(source, request) if isinstance(source, bytes) else source
        if isinstance(prompt, Prompt):
            return prompt
        self._counters.routed_by_load[prompt.value] += 1
        return Prompt(estimate_tokens(request.members), load_reason=prompt)

    def verify(self, prompt: Prompt, prompt_tokens: int | None) -> None:
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

    async def _by_engine(self, body: bytes, request: ApiRequest) -> Prompt | LoadReason:
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

    async def _named(self, tokens: list[int], *, is_by_engine: bool = False) -> Prompt:
        keys = await asyncio.get_running_loop().run_in_executor(self._threads, self._naming.block_keys, tokens)
        return Prompt(len(tokens), keys, is_by_engine=is_by_engine)


class PromptCache:
    """Prompts by the digest of the whole request, the least recently used of which leave first."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()
        self._size_keys = 0

    def get(self, digest: bytes) -> Prompt | None:
        prompt = self._prompts.get(digest)
        if prompt is not None:
            self._prompts.move_to_end(digest)
        return prompt

    def put(self, digest: bytes, prompt: Prompt) -> None:
        """A prompt counts as one key more than it has blocks."""
        if digest in self._prompts:
            return
        self._prompts[digest] = prompt
        self._size_keys += 1 + len(prompt.keys)
        while self._size_keys > self._max_keys:
            _, evicted = self._prompts.popitem(last=False)
            self._size_keys -= 1 + len(evicted.keys)
