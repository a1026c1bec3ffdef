"""KV cache blocks shared as tensors: a rank puts its shard, and ranks of another parallelism read theirs.

A stored value holds one block for a group of layers and a group of KV heads (client/tensors/parts.py), encoded by the
spec's scheme (kvcache/codecs/tensor_value.py). Everything goes through a Client; this module adds no protocol and no
policy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvstore.client.sync import Client
from kvstore.client.tensors.arrays import is_tensor, mark
from kvstore.client.tensors.batches import (
    PoolBlock,
    check_values,
    first_of_each,
    found_in,
    header_of,
    is_outside,
    move,
    places_of,
    refusal,
    runs,
    stopwatch,
    values_of,
    wanted_batches,
)
from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.parts import ValuePart, ValueShape, namespace_of, value_parts
from kvstore.client.tensors.pools import BlockPool, Blocks, EnginePool, PoolPlane, holds
from kvstore.client.tensors.prompts import Keys, Names, PromptSequence, check_prompts, flat, keys_of
from kvstore.client.tensors.staging_buffers import Rows, Stagings, read_values, write_values
from kvstore.kvcache.codecs.tensor_value import TensorHeader
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.retention import Retention

ONE_RANK: Final = Parallel()
WHOLE_LAYERS: Final = ValueShape()


class TensorCache:
    """Cache of one rank's shard. Thread-safe: each call leases its own staging memory, which is kept for the next.

    Blocks are in a tensor, or in an `EnginePool` (an engine's tensors, described by a `CacheLayout`). A tensor of
    blocks has shape `[blocks, layers, kv, heads, block_tokens, head_dim]` and the spec's dtype, with the rank's layers
    and heads; kv is 2, K and V (1 with MLA). It is a torch tensor on any device, or with scheme `none` a numpy array
    (uint16 for bfloat16), of any strides: an engine with `[tokens, heads]` passes a permuted view. `blocks` selects the
    blocks of a sequence in a pool, in order; by default all.

    With context parallelism a rank has every cp-th block of the sequence, starting at its own rank.

    Engines share blocks if their namespaces, specs (including the scheme) and `values` are equal; parallelism and pool
    layouts may differ. A rank that puts must hold all heads and layers of a value; a reader may need only a part.

    `layers` of a call (None: all of the rank's) are some of the model's, in whole groups of `values.layers`. An engine
    can thus put layers as they are computed, and read first the layers that it needs first.
    """

    def __init__(
        self,
        client: Client,
        spec: CacheSpec,
        namespace: Namespace,
        *,
        parallel: Parallel = ONE_RANK,
        rank: int = 0,
        values: ValueShape = WHOLE_LAYERS,
        settings: TensorSettings | None = None,
    ) -> None:
        """Args:
            client: remains the caller's to close.
            spec: of the whole model, not of the shard.
            namespace: of the model, with the elements' dtype, without layers, heads and scheme, which are added here.
            parallel: the engine's parallelism; `rank` is this shard's rank in it.
            values: heads and layers per stored value.
            settings: memory between tensors and store.

        Raises:
            InvalidArgument: the arguments do not match.
        """
        self._client = client
        self._layout = layout = CacheLayout(spec=spec, parallel=parallel, pool_blocks=1)
        self._rank = rank
        self._spec = spec
        self._namespace = namespace_of(spec, namespace)
        self._layers, self._heads = layout.rank_layers(rank), layout.rank_heads(rank)
        self._parts = value_parts(spec, self._namespace, layers=self._layers, heads=self._heads, shape=values)
        self._stagings = Stagings(settings or TensorSettings())
        self._shape = (len(self._layers), spec.kv_factor, len(self._heads), spec.block_tokens, spec.head_dim)
        self._cp, self._cp_rank = parallel.cp, parallel.coordinates(rank).cp
        copies = max(1, parallel.shards // spec.kv_heads)
        self._is_writer = parallel.shard_of(rank) % copies == 0

    @property
    def namespace(self) -> Namespace:
        """Namespace of all values of this cache, of every rank, as reported by `WeightsReporter`."""
        return self._namespace

    def match_prefix(
        self,
        token_ids: Names,
        *,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Number of leading blocks of the rank that are readable now, with every value that it needs.

        Another rank may find fewer. A lookup does not protect blocks from eviction. One request; raises as `Client`.
        `token_ids` and `extras` as in `put_tensor`.
        """
        return self.match_batch([PromptSequence(token_ids, extras=extras)], layers=layers, deadline_s=deadline_s)[0]

    def put_tensor(
        self,
        token_ids: Names,
        tensor: Any,
        *,
        blocks: Blocks | None = None,
        first_block: int = 0,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Store the rank's blocks in `tensor`, from block `first_block` of the sequence on; return how many values were
        new.

        `token_ids` is the whole sequence, because a block's key depends on all preceding tokens; a partial last block
        is ignored. `BlockHashes`, the engine's own block hashes, may replace it. `extras`: other inputs that change the
        values from a block on (see `PromptSequence`). `tensor` (see the class) must not change during the call. Of
        ranks with the same KV heads the first puts, and the others return 0.

        `retention`, here and in `get_tensor`, is a hint for the order of eviction (see `Client.retain`).

        Blocks are sent in order, in batches of `staging_bytes`. `deadline_s` is for the whole call; None: the client's
        per batch.

        Raises:
            InvalidArgument: the rank holds no whole values (the message names the setting), or an argument does not match.
            KVStoreError: as `Client.put_batch`; the first batches may be stored.
        """
        return self.put_batch(
            [PromptSequence(token_ids, blocks, first_block, extras)], tensor, layers=layers, retention=retention, deadline_s=deadline_s
        )[0]

    def get_tensor(
        self,
        token_ids: Names,
        out: Any,
        *,
        blocks: Blocks | None = None,
        first_block: int = 0,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Read the rank's blocks into `out`, from block `first_block` of the sequence on; return the number of leading
        blocks read.

        The rest of `out` (see the class) is unchanged. A block that lacks any value of the rank is a miss, never an
        error; batches after the first miss are not requested. Other arguments as in `put_tensor`.

        Raises:
            InvalidArgument: an argument does not match, or `out` is read-only.
            ProtocolError: values under these keys are not of this cache.
            KVStoreError: as `Client.get_batch_into`; the content of the blocks is undefined.
        """
        return self.get_batch(
            [PromptSequence(token_ids, blocks, first_block, extras)], out, layers=layers, retention=retention, deadline_s=deadline_s
        )[0]

    # --- many sequences ---

    def match_batch(self, prompts: Sequence[PromptSequence], *, layers: range | None = None, deadline_s: float | None = None) -> list[int]:
        """`match_prefix` of each prompt, from its `first_block` on, in one message."""
        check_prompts(prompts)
        parts = self._chosen(layers)
        of_prompts = [flat(keys_of(prompt, parts)[self._cp_rank :: self._cp][prompt.first_block :]) for prompt in prompts]
        if len(of_prompts) == 1:
            return [self._client.match_prefix(of_prompts[0], deadline_s=deadline_s) // len(parts)]
        found = self._client.exists_batch(flat(of_prompts), deadline_s=deadline_s)
        counts, start = [], 0
        for keys in of_prompts:
            of_prompt = [*found[start : start + len(keys)], False]
            counts.append(of_prompt.index(False) // len(parts))
            start += len(keys)
        return counts

    def put_batch(
        self,
        prompts: Sequence[PromptSequence],
        tensor: Any,
        *,
        layers: range | None = None,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> list[int]:
        """`put_tensor` for each prompt, all from one pool, with one message per staging memory.

        A block that several prompts begin with is put once, and counted for the first.
        """
        check_prompts(prompts)
        parts = self._chosen(layers)
        if not all(part.is_whole for part in parts):
            raise InvalidArgument(refusal(self._spec, self._layers, self._heads))
        left_s = stopwatch(deadline_s)
        pool = self._pool(tensor)
        blocks = self._blocks(prompts, pool, parts)
        blocks = first_of_each(blocks) if self._is_writer else []
        marked = mark(pool.device)
        stored = [0] * len(prompts)
        headers, sizes = self._headers(parts)
        with self._stagings.lend(is_pinned=pool.is_on_gpu) as staging:
            for start in range(0, len(blocks), at_once := staging.blocks(sizes)):
                batch = blocks[start : start + at_once]
                rows = staging.rows(len(batch), sizes)
                move(write_values, rows, headers, parts, pool, places_of(batch), marked)
                for index, is_new in enumerate(self._put(batch, rows, left_s(), retention)):
                    stored[batch[index // len(parts)].prompt] += is_new
        return stored

    def get_batch(
        self,
        prompts: Sequence[PromptSequence],
        out: Any,
        *,
        layers: range | None = None,
        retention: Retention | None = None,
        deadline_s: float | None = None,
    ) -> list[int]:
        """`get_tensor` for each prompt, into distinct blocks of one pool. A miss ends its own prompt only."""
        check_prompts(prompts)
        parts = self._chosen(layers)
        left_s = stopwatch(deadline_s)
        pool = self._pool(out)
        if not pool.is_writable:
            raise InvalidArgument("the array to read into is read-only")
        blocks = self._blocks(prompts, pool, parts)
        marked = mark(pool.device)
        headers, sizes = self._headers(parts)
        got, missed = [0] * len(prompts), set[int]()
        with self._stagings.lend(is_pinned=pool.is_on_gpu) as staging:
            for batch in wanted_batches(blocks, missed, staging.blocks(sizes)):
                rows = staging.rows(len(batch), sizes)
                keys = flat(block.keys for block in batch)
                sizes_read = self._client.get_batch_into(keys, values_of(rows), retention=retention, deadline_s=left_s())
                found = found_in(batch, sizes_read, len(parts), missed)
                for start, stop in runs(found):
                    of_run = sizes_read[start * len(parts) : stop * len(parts)]
                    whole = [of_part[start:stop] for of_part in rows]
                    check_values(whole, of_run, headers)
                    move(read_values, whole, headers, parts, pool, places_of(batch[start:stop]), marked)
                for index in found:
                    got[batch[index].prompt] += 1
        return got

    # --- keys and blocks of a call ---

    def keys(self, prompt: PromptSequence) -> list[Keys]:
        """For each full block of a sequence, the keys of the values that the rank needs.

        Raises InvalidArgument: `prompt` is no PromptSequence.
        """
        check_prompts([prompt])
        return keys_of(prompt, self._parts)

    def _put(self, batch: Sequence[PoolBlock], rows: Sequence[Rows], left_s: float | None, retention: Retention | None) -> list[bool]:
        parents = flat(block.parents for block in batch)
        keys = flat(block.keys for block in batch)
        return self._client.put_batch(
            keys, values_of(rows), namespace=self._namespace, parents=parents, retention=retention, deadline_s=left_s
        )

    def _chosen(self, layers: range | None) -> tuple[ValuePart, ...]:
        """The values with these layers of the model. Raises InvalidArgument if a value also has others."""
        if layers is None:
            return self._parts
        if not isinstance(layers, range):
            raise InvalidArgument(f"layers is a range of the model's layers, not a {type(layers).__name__}")
        meeting = [part for part in self._parts if part.model_layers.start < layers.stop and layers.start < part.model_layers.stop]
        if layers.step != 1 or not meeting or any(is_outside(part, layers, self._layers) for part in meeting):
            groups = sorted({(part.model_layers.start, part.model_layers.stop) for part in self._parts})
            raise InvalidArgument(f"layers is {layers}: it must be made of whole groups of layers, which are {groups} here")
        return tuple(meeting)

    def _headers(self, parts: Sequence[ValuePart]) -> tuple[list[TensorHeader], list[int]]:
        """Header and size in bytes of each value of a block."""
        headers = [header_of(self._spec, part) for part in parts]
        return headers, [header.value_bytes for header in headers]

    def _blocks(self, prompts: Sequence[PromptSequence], pool: BlockPool, parts: Sequence[ValuePart]) -> list[PoolBlock]:
        first: Sequence[None] = (None,) * len(parts)
        blocks = []
        for number, prompt in enumerate(prompts):
            chosen = pool.choose(prompt.blocks)
            keys = keys_of(prompt, parts)
            last = (prompt.first_block + len(chosen) - 1) * self._cp + self._cp_rank
            if len(chosen) and last >= len(keys):
                needed_tokens = (last + 1) * self._spec.block_tokens
                raise InvalidArgument(
                    f"the blocks of the tensor end with token {needed_tokens}, and token_ids has {len(keys)} full blocks: "
                    "name the prompt's blocks by `blocks`, or pass a slice of the tensor"
                )
            for index, place in enumerate(chosen.tolist(), prompt.first_block):
                at = index * self._cp + self._cp_rank
                blocks.append(PoolBlock(number, place, keys[at], keys[at - 1] if at else first))
        return blocks

    def _pool(self, tensor: Any) -> BlockPool:
        """The pool behind `tensor`. Raises InvalidArgument unless it is one of this rank."""
        if isinstance(tensor, EnginePool):
            if not tensor.fits(self._layout, self._rank):
                raise InvalidArgument("the pool is one of another model, or of another rank's layers or heads")
        else:
            self._check(tensor)
        pool = tensor if isinstance(tensor, EnginePool) else BlockPool([PoolPlane(range(self._shape[0]), range(self._shape[1]), tensor)])
        if not pool.is_tensor and not self._spec.scheme.is_raw:
            raise InvalidArgument(f"a numpy array cannot be encoded as {self._spec.scheme.name}: give a torch tensor")
        return pool

    def _check(self, tensor: Any) -> None:
        spec = self._spec
        if not is_tensor(tensor) and not isinstance(tensor, np.ndarray):
            raise InvalidArgument(f"blocks are a torch tensor or a numpy array, or an EnginePool, not {type(tensor).__name__}")
        if tensor.ndim != 6 or tuple(tensor.shape[1:]) != self._shape:
            axes = "[blocks, layers, kv, heads, tokens, head_dim]"
            raise InvalidArgument(f"this rank's blocks are {axes} = [any, {', '.join(map(str, self._shape))}], not {list(tensor.shape)}")
        if not holds(tensor, spec.dtype):
            raise InvalidArgument(f"the elements are {tensor.dtype}, and those of the cache {spec.dtype}: give that type's")
