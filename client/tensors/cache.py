"""Blocks of KV cache shared as tensors: a rank puts its shard, and ranks of another sharding read back theirs.

Values of the store hold one block for a group of layers and a group of KV heads of the model (`client/tensors/parts.py`), encoded by the
spec's scheme (`kvcache/codecs/tensor_value.py`). Everything goes through a Client: this file adds no protocol and no policy.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.client.arguments import check_deadline
from kvstore.client.sync import Client
from kvstore.client.tensors.parts import ValuePart, namespace_of, value_parts
from kvstore.client.tensors.staging import Rows, Staging, are_values, as_index, is_tensor, put_back, read_values, write_values
from kvstore.kvcache.codecs.tensor_value import TensorHeader
from kvstore.kvcache.hashing import TokenIds, as_int32
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.dtypes import dtype_bytes
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.rpc.deadline import Deadline

T = TypeVar("T")
Blocks: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Keys: TypeAlias = tuple[bytes, ...]
"""Of one block, one a value."""

ONE_RANK: Final = Parallel()


class TensorCache:
    """The shard of one rank, block by block. Not thread-safe: each rank has its own; they may share a client.

    A tensor of blocks is `[blocks, layers, kv, heads, block_tokens, head_dim]` of the spec's dtype: the rank's layers and heads; kv is 2,
    K and V (1 with MLA). It may be a torch tensor on any device or, if the scheme is `none`, a numpy array (which has no bfloat16:
    give uint16 there), of any strides: an engine that keeps `[tokens, heads]` gives a permuted view of its pool.
    Where the blocks of a sequence lie scattered in a pool, `blocks` says which they are, in order; without it they are all of the tensor.

    With context parallelism the blocks of a rank are every cp-th of the sequence, from its own first one on.

    Engines share blocks when their namespaces, specs (scheme included), `heads_per_value` and `layers_per_value` are equal; their
    parallelism may differ. A rank that puts must hold all the heads and layers of a value; one that reads may need only a part.
    """

    def __init__(
        self,
        client: Client,
        spec: CacheSpec,
        namespace: Namespace,
        *,
        parallel: Parallel = ONE_RANK,
        rank: int = 0,
        heads_per_value: int = 1,
        layers_per_value: int = 0,
    ) -> None:
        """
        Args:
            client: stays the caller's, who closes it.
            spec: of the whole model, not of the shard.
            namespace: of the model, with the elements' dtype; without layers and heads, and without the scheme: they are added here.
            parallel: how the engine splits the model; `rank` is this shard's number in it.
            heads_per_value: KV heads in a value. More make fewer and larger values, which no rank of fewer heads can put.
            layers_per_value: layers in a value; 0: all of the model, which no rank of a pipeline can put.

        Raises:
            InvalidArgument: these do not fit one another.
        """
        layout = CacheLayout(spec=spec, parallel=parallel, pool_blocks=1)
        layers, heads = layout.rank_layers(rank), layout.rank_heads(rank)
        self._client = client
        self._spec = spec
        self._namespace = namespace_of(spec, namespace)
        self._parts = value_parts(
            spec, self._namespace, layers=layers, heads=heads, heads_per_value=heads_per_value, layers_per_value=layers_per_value
        )
        self._headers = [_header(spec, part) for part in self._parts]
        self._staging = Staging([header.value_bytes for header in self._headers])
        self._shape = (len(layers), spec.kv_factor, len(heads), spec.block_tokens, spec.head_dim)
        self._cp, self._cp_rank = parallel.cp, parallel.coordinates(rank).cp
        copies = max(1, parallel.shards // spec.kv_heads)
        self._is_writer = parallel.shard_of(rank) % copies == 0
        self._refusal = "" if all(part.is_whole for part in self._parts) else _refusal(spec, layers, heads)

    def match_prefix(self, token_ids: TokenIds, *, deadline_s: float | None = None) -> int:
        """How many of the rank's blocks, from the first on without a gap, can be read now: every value that it needs is there.

        Another rank may find fewer. Asking keeps no block alive. One request, which raises as `Client` says.
        """
        keys = [key for of_block in self._keys(token_ids)[self._cp_rank :: self._cp] for key in of_block]
        return self._client.match_prefix(keys, deadline_s=deadline_s) // len(self._parts)

    def put_tensor(
        self, token_ids: TokenIds, tensor: Any, *, blocks: Blocks | None = None, first_block: int = 0, deadline_s: float | None = None
    ) -> int:
        """Store the rank's blocks from `first_block` of the sequence on, which are in `tensor`; how many values were not there already.

        `token_ids` is the sequence from its beginning on, for a block's key depends on all before it; a partial last block is ignored.
        `tensor` (see the class) must not change meanwhile. When this returns, all who need the values can read them. Of ranks with the same
        KV heads the first puts, and the others return 0 at once.

        Blocks go out in order, in batches of STAGING_BYTES. `deadline_s` is the time for all of it; None gives each batch the client's.

        Raises:
            InvalidArgument: the rank holds no whole values (the message says what to set), or an argument does not fit the class.
            KVStoreError: as `Client.put_batch`; the first batches may be stored.
        """
        if self._refusal:
            raise InvalidArgument(self._refusal)
        left_s = _stopwatch(deadline_s)
        chosen = self._choose(tensor, blocks)
        keys, parents = self._keys_at(token_ids, first_block, len(chosen))
        stored = 0
        for start, stop in self._batches(len(chosen) if self._is_writer else 0):
            rows = self._rows(tensor, stop - start)
            shard = tensor[as_index(chosen[start:stop])]
            for part, header, of_part in zip(self._parts, self._headers, rows, strict=True):
                write_values(of_part, header, shard[:, part.own_layers, :, part.own_heads])
            sent, before = _flat(keys[start:stop]), _flat(parents[start:stop])
            values = _flat(zip(*rows, strict=True))
            stored += sum(self._client.put_batch(sent, values, namespace=self._namespace, parents=before, deadline_s=left_s()))
        return stored

    def get_tensor(
        self, token_ids: TokenIds, out: Any, *, blocks: Blocks | None = None, first_block: int = 0, deadline_s: float | None = None
    ) -> int:
        """Read the rank's blocks from `first_block` of the sequence on into `out`; how many there were, from the first on without a gap.

        The rest of `out` (see the class) is as before: a block that misses any value the rank needs is a miss, never an error. `token_ids`
        and `deadline_s` as in `put_tensor`. Batches after the first with a miss are not asked for.

        Raises:
            InvalidArgument: an argument does not fit the class, or `out` cannot be written.
            ProtocolError: under these keys lies something else than this cache's values.
            KVStoreError: as `Client.get_batch_into`; the content of the blocks is undefined.
        """
        left_s = _stopwatch(deadline_s)
        chosen = self._choose(out, blocks)
        if not is_tensor(out) and not out.flags.writeable:
            raise InvalidArgument("the array to read into is read-only")
        keys, _ = self._keys_at(token_ids, first_block, len(chosen))
        got = 0
        for start, stop in self._batches(len(chosen)):
            rows = self._rows(out, stop - start)
            sizes = self._client.get_batch_into(_flat(keys[start:stop]), _flat(zip(*rows, strict=True)), deadline_s=left_s())
            found = (sizes + [None]).index(None) // len(rows)
            of_parts = np.array(sizes[: found * len(rows)], np.int64).reshape(found, len(rows)).T
            index = as_index(chosen[start : start + found])
            shard = out[index]
            for part, header, of_part, sizes_bytes in zip(self._parts, self._headers, rows, of_parts, strict=True):
                if not are_values(of_part[:found], sizes_bytes, header):
                    raise ProtocolError("a value of this namespace is not of this cache: put other programs' values under another")
                own = shard[:, part.own_layers, :, part.own_heads]
                read_values(of_part[:found], header, part.value_layers, part.value_heads, own)
            put_back(out, index, shard)
            got += found
            if found < stop - start:
                break
        return got

    # --- keys ---

    def _keys(self, token_ids: TokenIds) -> list[Keys]:
        """For each full block of the sequence a key for each value that the rank needs of it."""
        tokens = as_int32(token_ids)  # once: a list of 100,000 takes milliseconds
        return list(zip(*(part.namespace.block_keys(tokens) for part in self._parts), strict=True))

    def _keys_at(self, token_ids: TokenIds, first_block: int, count: int) -> tuple[list[Keys], list[Keys | tuple[None, ...]]]:
        """The keys of the rank's blocks [first_block, first_block + count), and of the blocks before them in the sequence."""
        if not isinstance(first_block, int) or first_block < 0:
            raise InvalidArgument(f"first_block is 0 or more, not {first_block!r}")
        keys = self._keys(token_ids)
        places = range(first_block * self._cp + self._cp_rank, (first_block + count) * self._cp, self._cp)
        if places and places[-1] >= len(keys):
            needed_tokens = (places[-1] + 1) * self._spec.block_tokens
            raise InvalidArgument(f"the blocks of the tensor end with token {needed_tokens}, and token_ids has {len(keys)} full blocks")
        first = (None,) * len(self._parts)
        return [keys[place] for place in places], [keys[place - 1] if place else first for place in places]

    # --- tensors ---

    def _choose(self, tensor: Any, blocks: Blocks | None) -> NDArray[np.int64]:
        """Which blocks of a tensor are meant, in order. Raises InvalidArgument for a tensor that does not fit, or has no such blocks."""
        self._check(tensor)
        if blocks is None:
            return np.arange(len(tensor))
        chosen = np.asarray(blocks)
        if chosen.ndim != 1 or (chosen.size and (chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= len(tensor))):
            raise InvalidArgument(f"blocks are numbers of those of the tensor, 0 to {len(tensor) - 1}, in one list")
        return chosen.astype(np.int64)

    def _check(self, tensor: Any) -> None:
        spec = self._spec
        if not is_tensor(tensor) and not isinstance(tensor, np.ndarray):
            raise InvalidArgument(f"blocks are a torch tensor or a numpy array, not {type(tensor).__name__}")
        if tensor.ndim != 6 or tuple(tensor.shape[1:]) != self._shape:
            axes = "[blocks, layers, kv, heads, tokens, head_dim]"
            raise InvalidArgument(f"this rank's blocks are {axes} = [any, {', '.join(map(str, self._shape))}], not {list(tensor.shape)}")
        if is_tensor(tensor):
            fits = str(tensor.dtype) == f"torch.{spec.dtype}"
        elif not spec.scheme.is_raw:
            raise InvalidArgument(f"a numpy array cannot be encoded as {spec.scheme.name}: give a torch tensor")
        else:
            fits = tensor.dtype.isnative and tensor.dtype.name in (spec.dtype, _stand_in(spec.dtype))
        if not fits:
            raise InvalidArgument(f"the elements are {tensor.dtype}, and those of the cache {spec.dtype}: give that type's")

    def _batches(self, blocks: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of the blocks that are staged at once."""
        for start in range(0, blocks, self._staging.blocks):
            yield start, min(start + self._staging.blocks, blocks)

    def _rows(self, tensor: Any, blocks: int) -> list[Rows]:
        return self._staging.rows(blocks, is_pinned=is_tensor(tensor) and tensor.is_cuda)


def _header(spec: CacheSpec, part: ValuePart) -> TensorHeader:
    return TensorHeader(
        scheme=spec.scheme,
        dtype=spec.dtype,
        kv_factor=spec.kv_factor,
        layers=part.layer_count,
        heads=part.head_count,
        tokens=spec.block_tokens,
        head_dim=spec.head_dim,
    )


def _refusal(spec: CacheSpec, layers: range, heads: range) -> str:
    """Why a rank that holds these cannot put, and what would let it."""
    fitting_layers = math.gcd(layers.start, layers.stop % spec.layers) or spec.layers
    return (
        f"layers {layers.start} to {layers.stop - 1} and KV heads {heads.start} to {heads.stop - 1}, which this rank holds, are not whole "
        f"values: to put them, all engines that share the cache must set layers_per_value to {fitting_layers} and heads_per_value to "
        f"{len(heads)}, or to divisors of these"
    )


def _stand_in(dtype: str) -> str:
    """The type by which numpy may hold elements that it has no type for."""
    return f"uint{8 * dtype_bytes(dtype)}" if dtype not in np.sctypeDict else dtype


def _stopwatch(deadline_s: float | None) -> Callable[[], float | None]:
    """Tells the time that is left for the whole of a call, None where it has none of its own. Raises InvalidArgument."""
    if deadline_s is None:
        return lambda: None
    check_deadline(deadline_s)
    return Deadline(deadline_s).left_s


def _flat(of_blocks: Iterable[Iterable[T]]) -> list[T]:
    """Block by block, as a batch is sent."""
    return list(chain.from_iterable(of_blocks))
