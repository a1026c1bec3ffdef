"""`TensorCache` for asyncio: the same steps, awaited."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.client.aio import AsyncClient
from kvstore.client.tensors.cache import RankCache
from kvstore.client.tensors.pools import Blocks
from kvstore.client.tensors.prompts import Names, Prompt
from kvstore.client.tensors.steps import run_async


class AsyncTensorCache(RankCache[AsyncClient]):
    """`TensorCache`'s twin over an AsyncClient: the same arguments, values and errors. Tasks of one event loop may share it.

    Copies of many bytes are made in a thread, so that the loop goes on. A cancelled call ends when the copy under way has: nothing is at
    the caller's tensors any more.
    """

    async def match_prefix(
        self,
        token_ids: Names,
        *,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """As `TensorCache.match_prefix`."""
        return (await self.match_batch([Prompt(token_ids, extras=extras)], layers=layers, deadline_s=deadline_s))[0]

    async def put_tensor(
        self,
        token_ids: Names,
        tensor: Any,
        *,
        blocks: Blocks | None = None,
        first_block: int = 0,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """As `TensorCache.put_tensor`."""
        return (await self.put_batch([Prompt(token_ids, blocks, first_block, extras)], tensor, layers=layers, deadline_s=deadline_s))[0]

    async def get_tensor(
        self,
        token_ids: Names,
        out: Any,
        *,
        blocks: Blocks | None = None,
        first_block: int = 0,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """As `TensorCache.get_tensor`."""
        return (await self.get_batch([Prompt(token_ids, blocks, first_block, extras)], out, layers=layers, deadline_s=deadline_s))[0]

    async def match_batch(self, prompts: Sequence[Prompt], *, layers: range | None = None, deadline_s: float | None = None) -> list[int]:
        """As `TensorCache.match_batch`."""
        return await run_async(self._operations.match(prompts, layers, deadline_s), self._client)

    async def put_batch(
        self, prompts: Sequence[Prompt], tensor: Any, *, layers: range | None = None, deadline_s: float | None = None
    ) -> list[int]:
        """As `TensorCache.put_batch`."""
        return await run_async(self._operations.put(prompts, tensor, layers, deadline_s), self._client)

    async def get_batch(
        self, prompts: Sequence[Prompt], out: Any, *, layers: range | None = None, deadline_s: float | None = None
    ) -> list[int]:
        """As `TensorCache.get_batch`."""
        return await run_async(self._operations.get(prompts, out, layers, deadline_s), self._client)
