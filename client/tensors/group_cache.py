"""Caches of models whose layers keep different things: windows, latents with an indexer beside them, states. Blocking and for asyncio."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic

from kvstore.client.aio import AsyncClient
from kvstore.client.sync import Client
from kvstore.client.tensors.cache import ONE_RANK, C
from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.group_operations import GroupOperations
from kvstore.client.tensors.groups import AnyGroup, Table
from kvstore.client.tensors.prompts import Names
from kvstore.client.tensors.steps import run, run_async
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.namespace import Namespace

NO_STATES: Mapping[str, Any] = {}


class OfGroups(Generic[C]):
    """The part that `GroupCache` and `AsyncGroupCache` have in common."""

    def __init__(
        self,
        client: C,
        groups: Sequence[AnyGroup],
        namespace: Namespace,
        *,
        parallel: Parallel = ONE_RANK,
        rank: int = 0,
        settings: TensorSettings | None = None,
    ) -> None:
        """
        Args:
            client: stays the caller's, who closes it.
            groups: all of the model's, which may differ in layers, heads, element type and tokens a block.
            namespace: of the model; what is a group's own (element type, tokens a block, its name) is set for each.
            parallel: how the engine splits the model; `rank` is this shard's number in it. Not by context.
            settings: how much memory lies between tensors and store, for each group.

        Raises:
            InvalidArgument: these do not fit one another.
        """
        self._client = client
        self._operations = GroupOperations(groups, namespace, parallel=parallel, rank=rank, settings=settings)


class GroupCache(OfGroups[Client]):
    """The shard of one rank of a hybrid model. Threads may share it.

    Each group with blocks has a `Table` of its own in a call, by its name; each with states a buffer, or a list of them, which together are
    the bytes of one sequence's state. A position counts as cached when every group can go on from it: those that attend to everything have
    all blocks before it, those with a window the last ones, those with a state the state after exactly so many tokens. Errors are those of
    `TensorCache`.
    """

    def match(self, names: Names, *, extras: Mapping[int, bytes] | None = None, deadline_s: float | None = None) -> int:
        """After how many tokens of the sequence every group can go on now; 0: from the beginning only. One message. `names` and `extras`
        as in `Prompt`; an engine that needs a token to compute leaves the last one out."""
        return run(self._operations.match(names, extras, deadline_s), self._client)

    def put(
        self,
        names: Names,
        tables: Mapping[str, Table],
        *,
        states: Mapping[str, Any] = NO_STATES,
        state_tokens: int = 0,
        extras: Mapping[int, bytes] | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Store the blocks of the tables, and the states, which are those after `state_tokens` tokens; how many values were not there
        already. Some of the groups will do: others come with a later call. `deadline_s` is each group's."""
        return run(self._operations.put(names, tables, states, state_tokens, extras, deadline_s), self._client)

    def get(
        self,
        names: Names,
        tables: Mapping[str, Table],
        *,
        states: Mapping[str, Any] = NO_STATES,
        extras: Mapping[int, bytes] | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """As `match`, with what each group needs from there on read into its table or state. Of a window only these blocks are read. The
        content of other blocks of the tables, and of all of them where it is 0, is undefined. `deadline_s` is each group's."""
        return run(self._operations.get(names, tables, states, extras, deadline_s), self._client)


class AsyncGroupCache(OfGroups[AsyncClient]):
    """`GroupCache`'s twin over an AsyncClient. Tasks of one event loop may share it."""

    async def match(self, names: Names, *, extras: Mapping[int, bytes] | None = None, deadline_s: float | None = None) -> int:
        """As `GroupCache.match`."""
        return await run_async(self._operations.match(names, extras, deadline_s), self._client)

    async def put(
        self,
        names: Names,
        tables: Mapping[str, Table],
        *,
        states: Mapping[str, Any] = NO_STATES,
        state_tokens: int = 0,
        extras: Mapping[int, bytes] | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """As `GroupCache.put`."""
        return await run_async(self._operations.put(names, tables, states, state_tokens, extras, deadline_s), self._client)

    async def get(
        self,
        names: Names,
        tables: Mapping[str, Table],
        *,
        states: Mapping[str, Any] = NO_STATES,
        extras: Mapping[int, bytes] | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """As `GroupCache.get`."""
        return await run_async(self._operations.get(names, tables, states, extras, deadline_s), self._client)
