"""Cache of a hybrid model, whose layer groups keep different data: sliding windows, latents with an indexer, recurrent
states."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvstore.client.sync import Client
from kvstore.client.tensors.cache import ONE_RANK, TensorCache
from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.groups import AnyGroup, GroupBlockTable, Present, StateGroup, check_groups, longest
from kvstore.client.tensors.prompts import BlockHashes, Keys, Names, PromptSequence, flat, keys_in
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.retention import Retention

NO_STATES: Final[Mapping[str, Any]] = {}
MAX_READS: Final = 8
"""Reads of a prompt, each limited to the blocks that the previous one found. More than one is rare (a block was evicted
meanwhile), unless a failed tier lists blocks that cannot be read."""


class _Sequence(NamedTuple):
    """Names of a sequence's blocks."""

    names: Names
    extras: Mapping[int, bytes] | None

    def prompt(self, blocks: Any = None, first_block: int = 0) -> PromptSequence:
        return PromptSequence(self.names, blocks, first_block, self.extras)


class GroupCache:
    """Cache of one rank's shard of a hybrid model. Thread-safe.

    Each group with blocks has a `GroupBlockTable` in a call, by group name; each group with states has a buffer, or a
    list of buffers, for the bytes of one sequence's state. A position is cached if every group can resume from it: full
    attention needs all preceding blocks, a sliding window the last ones, a recurrent group the state after exactly that
    many tokens. Errors as in `TensorCache`.
    """

    def __init__(
        self,
        client: Client,
        groups: Sequence[AnyGroup],
        namespace: Namespace,
        *,
        parallel: Parallel = ONE_RANK,
        rank: int = 0,
        settings: TensorSettings | None = None,
    ) -> None:
        """Args:
            client: remains the caller's to close.
            groups: all groups of the model; they may differ in layers, heads, element type and tokens per block.
            namespace: of the model; a group's own fields (element type, tokens per block, name) are set for each.
            parallel: the engine's parallelism, without context parallelism; `rank` is this shard's rank in it.
            settings: memory between tensors and store, per group.

        Raises:
            InvalidArgument: the arguments do not match.
        """
        self._client = client
        check_groups(groups)
        if parallel.cp > 1:
            raise InvalidArgument("groups of layers are not split by context parallelism: cp must be 1")
        self._groups = groups
        self._tensors: dict[str, TensorCache] = {}
        self._states: dict[str, Namespace] = {}
        for group in groups:
            own = dataclasses.replace(namespace, block_tokens=group.block_tokens, extra={**namespace.extra, "group": group.name})
            if isinstance(group, StateGroup):
                self._states[group.name] = _of_states(own, group, parallel, rank)
                continue
            of_group = dataclasses.replace(own, dtype=group.spec.dtype)
            self._tensors[group.name] = TensorCache(
                client, group.spec, of_group, parallel=parallel, rank=rank, values=group.values, settings=settings
            )

    def match(self, names: Names, *, extras: Mapping[int, bytes] | None = None, deadline_s: float | None = None) -> int:
        """Most tokens of the sequence after which every group can resume now; 0: none. One message.

        `names` and `extras` as in `PromptSequence`. An engine that must compute one token leaves the last one out.
        """
        return self._longest(self._present(_Sequence(names, extras), deadline_s))

    def put(
        self,
        names: Names,
        tables: Mapping[str, GroupBlockTable],
        *,
        states: Mapping[str, Any] = NO_STATES,
        state_tokens: int = 0,
        extras: Mapping[int, bytes] | None = None,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Store the blocks of the tables, and the states after `state_tokens` tokens; return how many values were new.

        A subset of the groups may be put; others follow in later calls. `deadline_s` applies per group. `retention`,
        here and in `get`, is a hint for the order of eviction (see `Client.retain`).
        """
        sequence = _Sequence(names, extras)
        self._check_names(tables, states)
        stored = 0
        for name, table in tables.items():
            prompt = sequence.prompt(table.blocks, table.first_block)
            stored += self._tensors[name].put_batch([prompt], table.pool, retention=retention, deadline_s=deadline_s)[0]
        for name, state in states.items():
            namespace, key = self._states[name], self._state_key(name, sequence, state_tokens)
            stored += self._client.put(key, state, namespace=namespace, retention=retention, deadline_s=deadline_s)
        return stored

    def get(
        self,
        names: Names,
        tables: Mapping[str, GroupBlockTable],
        *,
        states: Mapping[str, Any] = NO_STATES,
        extras: Mapping[int, bytes] | None = None,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """As `match`, reading what each group needs to resume into its table or state. Of a window only the needed
        blocks are read.

        The content of other blocks of the tables is undefined, and of all blocks if the result is 0. `deadline_s`
        applies per group. A block that is evicted meanwhile, or unreadable, shortens the result: the longest prefix
        among the rest is read, up to MAX_READS times.
        """
        sequence = _Sequence(names, extras)
        self._check_names(tables, states)
        if len(tables) + len(states) < len(self._groups):
            raise InvalidArgument(f"each of the groups {', '.join(group.name for group in self._groups)} needs its table or state")
        present = self._present(sequence, deadline_s)
        for _ in range(MAX_READS):
            tokens = self._longest(present)
            missed = self._read(sequence, tokens, tables, states, retention, deadline_s) if tokens else None
            if missed is None:
                return tokens
            of_group, block = missed
            present[of_group][block] = False
        return 0

    def _present(self, sequence: _Sequence, deadline_s: float | None) -> list[Present]:
        """For each group, which blocks are present."""
        of_groups = [self._keys(group, sequence) for group in self._groups]
        found = self._client.exists_batch(flat(map(flat, of_groups)), deadline_s=deadline_s)
        present: list[Present] = []
        start = 0
        for keys in of_groups:
            stop = start + len(flat(keys))
            values_each = len(keys[0]) if keys else 1
            of_group: Present = np.array(found[start:stop], np.bool_).reshape(-1, values_each).min(axis=1, initial=True)
            present.append(of_group)
            start = stop
        return present

    def _longest(self, present: Sequence[Present]) -> int:
        most = max(len(of_group) * group.block_tokens for group, of_group in zip(self._groups, present, strict=True))
        return longest(self._groups, present, limit_tokens=most)

    def _read(
        self,
        sequence: _Sequence,
        tokens: int,
        tables: Mapping[str, GroupBlockTable],
        states: Mapping[str, Any],
        retention: Retention | None,
        deadline_s: float | None,
    ) -> tuple[int, int] | None:
        """Read what every group needs after `tokens` tokens: (group, block) of the first failure; None: all was
        read."""
        for number, group in enumerate(self._groups):
            if isinstance(group, StateGroup):
                key, state = self._state_key(group.name, sequence, tokens), states[group.name]
                size_bytes = self._client.get_into(key, state, retention=retention, deadline_s=deadline_s)
                if size_bytes not in (None, group.state_bytes):
                    raise ProtocolError(f"the stored state of group {group.name} has {size_bytes} bytes instead of {group.state_bytes}")
                if size_bytes is None:
                    return number, tokens // group.block_tokens - 1
            else:
                first, end = group.first_needed(tokens), tokens // group.block_tokens
                table = tables[group.name]
                prompt = sequence.prompt(table.part(first, end), first)
                [got] = self._tensors[group.name].get_batch([prompt], table.pool, retention=retention, deadline_s=deadline_s)
                if got < end - first:
                    return number, first + got
        return None

    # --- keys ---

    def _keys(self, group: AnyGroup, sequence: _Sequence) -> list[Keys]:
        if isinstance(sequence.names, BlockHashes) and len({each.block_tokens for each in self._groups}) > 1:
            raise InvalidArgument("an engine's hashes are of blocks of one size, and these groups have several: give token ids")
        if isinstance(group, StateGroup):
            return keys_in([self._states[group.name]], sequence.prompt())
        return self._tensors[group.name].keys(sequence.prompt())

    def _state_key(self, name: str, sequence: _Sequence, tokens: int) -> bytes:
        namespace = self._states[name]
        keys = keys_in([namespace], sequence.prompt())
        if tokens % namespace.block_tokens or not 0 < tokens <= len(keys) * namespace.block_tokens:
            raise InvalidArgument(
                f"a state after {tokens} tokens: it is one after whole blocks of {namespace.block_tokens}, up to {len(keys)}"
            )
        return keys[tokens // namespace.block_tokens - 1][0]

    def _check_names(self, tables: Mapping[str, GroupBlockTable], states: Mapping[str, Any]) -> None:
        for given, known, kind in ((tables, self._tensors, "tables"), (states, self._states, "states")):
            if unknown := set(given) - set(known):
                raise InvalidArgument(
                    f"no group with {kind} is called {', '.join(sorted(unknown))}: there are {', '.join(known) or 'none'}"
                )


def _of_states(namespace: Namespace, group: StateGroup, parallel: Parallel, rank: int) -> Namespace:
    """Namespace of a group's states, which depend on rank and parallelism."""
    stage = parallel.coordinates(rank).pp
    extra = {**namespace.extra, "state": f"{group.state_bytes} {group.form}", "stage": f"{stage} of {parallel.pp} {parallel.layer_split}"}
    return dataclasses.replace(namespace, heads=(parallel.shard_of(rank), parallel.shards), extra=extra)
