"""What a cache of several groups of layers does, as steps: each group by operations of its own, and one answer for all."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.groups import AnyGroup, Present, StateGroup, Table, check_groups, longest
from kvstore.client.tensors.operations import TensorOperations
from kvstore.client.tensors.prompts import BlockHashes, Keys, Names, Prompt, flat, keys_in
from kvstore.client.tensors.steps import Call, Steps
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument, ProtocolError


class _Sequence(NamedTuple):
    """What names a sequence's blocks."""

    names: Names
    extras: Mapping[int, bytes] | None

    def prompt(self, blocks: Any = None, first_block: int = 0) -> Prompt:
        return Prompt(self.names, blocks, first_block, self.extras)


class GroupOperations:
    """Of one rank."""

    def __init__(
        self, groups: Sequence[AnyGroup], namespace: Namespace, *, parallel: Parallel, rank: int, settings: TensorSettings | None
    ) -> None:
        """Raises InvalidArgument: these do not fit one another."""
        check_groups(groups)
        if parallel.cp > 1:
            raise InvalidArgument("groups of layers are not split by context parallelism: cp must be 1")
        self._groups = groups
        self._tensors: dict[str, TensorOperations] = {}
        self._states: dict[str, Namespace] = {}
        for group in groups:
            own = dataclasses.replace(namespace, block_tokens=group.block_tokens, extra={**namespace.extra, "group": group.name})
            if isinstance(group, StateGroup):
                self._states[group.name] = _of_states(own, group, parallel, rank)
                continue
            self._tensors[group.name] = TensorOperations(
                group.spec,
                dataclasses.replace(own, dtype=group.spec.dtype),
                parallel=parallel,
                rank=rank,
                heads_per_value=group.heads_per_value,
                layers_per_value=group.layers_per_value,
                settings=settings,
            )

    def match(self, names: Names, extras: Mapping[int, bytes] | None, deadline_s: float | None) -> Steps[int]:
        """After how many tokens every group can go on. One message."""
        return self._match(_Sequence(names, extras), None, deadline_s)

    def put(
        self,
        names: Names,
        tables: Mapping[str, Table],
        states: Mapping[str, Any],
        state_tokens: int,
        extras: Mapping[int, bytes] | None,
        deadline_s: float | None,
    ) -> Steps[int]:
        """How many values were not there already."""
        sequence = _Sequence(names, extras)
        self._check_names(tables, states)
        stored = 0
        for name, table in tables.items():
            prompt = sequence.prompt(table.blocks, table.first_block)
            stored += (yield from self._tensors[name].put([prompt], table.pool, None, deadline_s))[0]
        for name, state in states.items():
            namespace, key = self._states[name], self._state_key(name, sequence, state_tokens)
            put = Call(lambda client: client.put(key, state, namespace=namespace, deadline_s=deadline_s))  # noqa: B023  (called before the next)
            stored += yield put
        return stored

    def get(
        self,
        names: Names,
        tables: Mapping[str, Table],
        states: Mapping[str, Any],
        extras: Mapping[int, bytes] | None,
        deadline_s: float | None,
    ) -> Steps[int]:
        """After how many tokens every group can go on, with what it needs for that in its table or state. What is evicted between the
        question and the reading makes it fewer."""
        sequence = _Sequence(names, extras)
        self._check_names(tables, states)
        if len(tables) + len(states) < len(self._groups):
            raise InvalidArgument(f"each of the groups {', '.join(group.name for group in self._groups)} needs its table or state")
        limit_tokens = None
        while tokens := (yield from self._match(sequence, limit_tokens, deadline_s)):
            if (yield from self._read(sequence, tokens, tables, states, deadline_s)):
                return tokens
            limit_tokens = tokens - 1
        return 0

    def _match(self, sequence: _Sequence, limit_tokens: int | None, deadline_s: float | None) -> Steps[int]:
        of_groups = [self._keys(group, sequence) for group in self._groups]
        found = yield Call(lambda client: client.exists_batch(flat(map(flat, of_groups)), deadline_s=deadline_s))
        present: list[Present] = []
        start = 0
        for keys in of_groups:
            stop = start + len(flat(keys))
            values_each = len(keys[0]) if keys else 1
            of_group: Present = np.array(found[start:stop], np.bool_).reshape(-1, values_each).min(axis=1, initial=True)
            present.append(of_group)
            start = stop
        most = max(len(keys) * group.block_tokens for group, keys in zip(self._groups, of_groups, strict=True))
        return longest(self._groups, present, limit_tokens=most if limit_tokens is None else limit_tokens)

    def _read(
        self, sequence: _Sequence, tokens: int, tables: Mapping[str, Table], states: Mapping[str, Any], deadline_s: float | None
    ) -> Steps[bool]:
        """Whether all that is needed after so many tokens was there still."""
        for group in self._groups:
            if isinstance(group, StateGroup):
                key, state = self._state_key(group.name, sequence, tokens), states[group.name]
                get = Call(lambda client: client.get_into(key, state, deadline_s=deadline_s))  # noqa: B023  (called before the next)
                size_bytes = yield get
                if size_bytes not in (None, group.state_bytes):
                    raise ProtocolError(f"a state of {size_bytes} bytes, where {group.name} has {group.state_bytes}")
                is_there = size_bytes is not None
            else:
                first, end = group.first_needed(tokens), tokens // group.block_tokens
                table = tables[group.name]
                prompt = sequence.prompt(table.part(first, end), first)
                [got] = yield from self._tensors[group.name].get([prompt], table.pool, None, deadline_s)
                is_there = got == end - first
            if not is_there:
                return False
        return True

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

    def _check_names(self, tables: Mapping[str, Table], states: Mapping[str, Any]) -> None:
        for given, known, kind in ((tables, self._tensors, "tables"), (states, self._states, "states")):
            if unknown := set(given) - set(known):
                raise InvalidArgument(
                    f"no group with {kind} is called {', '.join(sorted(unknown))}: there are {', '.join(known) or 'none'}"
                )


def _of_states(namespace: Namespace, group: StateGroup, parallel: Parallel, rank: int) -> Namespace:
    """A state is its rank's alone: what it has depends on how the model is split."""
    stage = parallel.coordinates(rank).pp
    extra = {**namespace.extra, "state": f"{group.state_bytes} {group.form}", "stage": f"{stage} of {parallel.pp} {parallel.layer_split}"}
    return dataclasses.replace(namespace, heads=(parallel.shard_of(rank), parallel.shards), extra=extra)
