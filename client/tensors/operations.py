"""What a cache of tensors does: the values of a rank's shard, their keys, and their way through staging memory.

A call for many sequences is one message each way for as many blocks as the staging memory holds, whosesoever they are.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client.core.arguments import check_deadline
from kvstore.client.sync import Client
from kvstore.client.tensors.arrays import as_index, beside, is_tensor, mark
from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.parts import ValuePart, ValueShape, namespace_of, value_parts
from kvstore.client.tensors.pools import EnginePool, Plane, Pool, holds
from kvstore.client.tensors.prompts import Keys, Prompt, check_prompts, flat, keys_of
from kvstore.client.tensors.staging import Piece, Rows, Stagings, are_values, read_values, write_values
from kvstore.kvcache.codecs.tensor_value import TensorHeader
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.rpc.deadline import Deadline


@dataclasses.dataclass(slots=True)
class _Block:
    """One block of a call."""

    prompt: int
    """Whose it is: the index of its prompt."""
    place: int
    """In the pool."""
    keys: Keys
    parents: Sequence[bytes | None]


class TensorOperations:
    """Of one rank. Immutable but for the memory that it keeps; threads and tasks may use it at once."""

    def __init__(
        self,
        client: Client,
        spec: CacheSpec,
        namespace: Namespace,
        *,
        parallel: Parallel,
        rank: int,
        values: ValueShape,
        settings: TensorSettings | None,
    ) -> None:
        """Raises InvalidArgument: these do not fit one another."""
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
        """See `TensorCache.namespace`."""
        return self._namespace

    def keys(self, prompt: Prompt) -> list[Keys]:
        """Of each full block of a sequence, those of the values that the rank needs."""
        return keys_of(prompt, self._parts)

    def match(self, prompts: Sequence[Prompt], layers: range | None, deadline_s: float | None) -> list[int]:
        """For each prompt how many of the rank's blocks can be read, from `first_block` on without a gap."""
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

    def put(self, prompts: Sequence[Prompt], tensor: Any, layers: range | None, deadline_s: float | None) -> list[int]:
        """For each prompt how many values were not there already. What two prompts share is put once, and counted for the first."""
        check_prompts(prompts)
        parts = self._chosen(layers)
        if not all(part.is_whole for part in parts):
            raise InvalidArgument(_refusal(self._spec, self._layers, self._heads))
        left_s = _stopwatch(deadline_s)
        pool = self._pool(tensor)
        blocks = self._blocks(prompts, pool, parts)
        blocks = _first_of_each(blocks) if self._is_writer else []
        marked = mark(pool.device)
        stored = [0] * len(prompts)
        headers, sizes = self._headers(parts)
        with self._stagings.lend(is_pinned=pool.is_on_gpu) as staging:
            for start in range(0, len(blocks), at_once := staging.blocks(sizes)):
                batch = blocks[start : start + at_once]
                rows = staging.rows(len(batch), sizes)
                _move(write_values, rows, headers, parts, pool, _places(batch), marked)
                for index, is_new in enumerate(self._put(batch, rows, left_s())):
                    stored[batch[index // len(parts)].prompt] += is_new
        return stored

    def get(self, prompts: Sequence[Prompt], out: Any, layers: range | None, deadline_s: float | None) -> list[int]:
        """For each prompt how many blocks there were, from the first of its table on without a gap; these are in `out` now."""
        check_prompts(prompts)
        parts = self._chosen(layers)
        left_s = _stopwatch(deadline_s)
        pool = self._pool(out)
        if not pool.is_writable:
            raise InvalidArgument("the array to read into is read-only")
        blocks = self._blocks(prompts, pool, parts)
        marked = mark(pool.device)
        headers, sizes = self._headers(parts)
        got, missed = [0] * len(prompts), set[int]()
        with self._stagings.lend(is_pinned=pool.is_on_gpu) as staging:
            for batch in _wanted(blocks, missed, staging.blocks(sizes)):
                rows = staging.rows(len(batch), sizes)
                keys = flat(block.keys for block in batch)
                sizes_read = self._client.get_batch_into(keys, _values(rows), deadline_s=left_s())
                found = _found(batch, sizes_read, len(parts), missed)
                for start, stop in _runs(found):
                    of_run = sizes_read[start * len(parts) : stop * len(parts)]
                    whole = [of_part[start:stop] for of_part in rows]
                    _check(whole, of_run, headers)
                    _move(read_values, whole, headers, parts, pool, _places(batch[start:stop]), marked)
                for index in found:
                    got[batch[index].prompt] += 1
        return got

    def _put(self, batch: Sequence[_Block], rows: Sequence[Rows], left_s: float | None) -> list[bool]:
        parents = flat(block.parents for block in batch)
        keys = flat(block.keys for block in batch)
        return self._client.put_batch(keys, _values(rows), namespace=self._namespace, parents=parents, deadline_s=left_s)

    # --- what a call is about ---

    def _chosen(self, layers: range | None) -> tuple[ValuePart, ...]:
        """The values that hold these layers of the model, of the rank's. Raises InvalidArgument where a value has others, too."""
        if layers is None:
            return self._parts
        if not isinstance(layers, range):
            raise InvalidArgument(f"layers is a range of the model's layers, not a {type(layers).__name__}")
        meeting = [part for part in self._parts if part.model_layers.start < layers.stop and layers.start < part.model_layers.stop]
        if layers.step != 1 or not meeting or any(_outside(part, layers, self._layers) for part in meeting):
            groups = sorted({(part.model_layers.start, part.model_layers.stop) for part in self._parts})
            raise InvalidArgument(f"layers is {layers}: it must be made of whole groups of layers, which are {groups} here")
        return tuple(meeting)

    def _headers(self, parts: Sequence[ValuePart]) -> tuple[list[TensorHeader], list[int]]:
        """Of each value of a block, and its size in bytes."""
        headers = [_header(self._spec, part) for part in parts]
        return headers, [header.value_bytes for header in headers]

    def _blocks(self, prompts: Sequence[Prompt], pool: Pool, parts: Sequence[ValuePart]) -> list[_Block]:
        first: Sequence[None] = (None,) * len(parts)
        blocks = []
        for number, prompt in enumerate(prompts):
            chosen = pool.choose(prompt.blocks)
            keys = keys_of(prompt, parts)
            last = (prompt.first_block + len(chosen) - 1) * self._cp + self._cp_rank
            if len(chosen) and last >= len(keys):
                needed_tokens = (last + 1) * self._spec.block_tokens
                raise InvalidArgument(f"the blocks of the tensor end with token {needed_tokens}, and token_ids has {len(keys)} full blocks")
            for index, place in enumerate(chosen.tolist(), prompt.first_block):
                at = index * self._cp + self._cp_rank
                blocks.append(_Block(number, place, keys[at], keys[at - 1] if at else first))
        return blocks

    def _pool(self, tensor: Any) -> Pool:
        """Raises InvalidArgument for what is no pool of this rank."""
        if isinstance(tensor, EnginePool):
            if not tensor.fits(self._layout, self._rank):
                raise InvalidArgument("the pool is one of another model, or of another rank's layers or heads")
        else:
            self._check(tensor)
        pool = tensor if isinstance(tensor, EnginePool) else Pool([Plane(range(self._shape[0]), range(self._shape[1]), tensor)])
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


# --- moves ---


def _move(
    how: Callable[[Rows, TensorHeader, Sequence[Piece]], None],
    rows: Sequence[Rows],
    headers: Sequence[TensorHeader],
    parts: Sequence[ValuePart],
    pool: Pool,
    places: NDArray[np.int64],
    marked: Any,
) -> None:
    """Write or read the values of blocks at these places of a pool."""
    with beside(pool.device, marked):
        for of_part, header, part in zip(rows, headers, parts, strict=True):
            how(of_part, header, _pieces(pool, part, places))


def _pieces(pool: Pool, part: ValuePart, places: NDArray[np.int64]) -> list[Piece]:
    """What each plane of the pool has of the values of a part."""
    index = as_index(places)
    shift = part.value_layers.start - part.own_layers.start  # from the rank's layers to the value's
    pieces = []
    for plane in pool.planes:
        start, stop = max(plane.layers.start, part.own_layers.start), min(plane.layers.stop, part.own_layers.stop)
        if start < stop:
            own = plane.values[:, start - plane.layers.start : stop - plane.layers.start, :, part.own_heads]
            kinds = slice(plane.kinds.start, plane.kinds.stop)
            pieces.append(Piece(slice(start + shift, stop + shift), kinds, part.value_heads, own, index))
    return pieces


def _values(rows: Sequence[Rows]) -> Any:
    """Block by block; of one array its rows are the values, and cost no object each."""
    return rows[0] if len(rows) == 1 else flat(zip(*rows, strict=True))


def _check(rows: Sequence[Rows], sizes_read: Sequence[int | None], headers: Sequence[TensorHeader]) -> None:
    """Raises ProtocolError unless these are values of this cache."""
    of_parts = np.array(sizes_read, np.int64).reshape(-1, len(rows)).T
    for of_part, sizes_bytes, header in zip(rows, of_parts, headers, strict=True):
        if not are_values(of_part, sizes_bytes, header):
            raise ProtocolError("a value of this namespace is not of this cache: put other programs' values under another")


# --- batches ---


def _first_of_each(blocks: Sequence[_Block]) -> list[_Block]:
    """What several prompts begin with is one block: the first's, in its place before those that follow it."""
    found: dict[Keys, _Block] = {}
    for block in blocks:
        found.setdefault(block.keys, block)
    return list(found.values())


def _wanted(blocks: Sequence[_Block], missed: set[int], at_once: int) -> Iterator[list[_Block]]:
    """So many at a time, in order, but none of a prompt that has missed one meanwhile."""
    batch: list[_Block] = []
    left = iter(blocks)
    while True:
        for block in left:
            if block.prompt not in missed:
                batch.append(block)
                if len(batch) == at_once:
                    break
        if not batch:
            return
        yield batch
        batch = []


def _found(batch: Sequence[_Block], sizes_read: Sequence[int | None], values_each: int, missed: set[int]) -> list[int]:
    """Which blocks of a batch are there whole, and all before them of their prompts."""
    found = []
    for index, block in enumerate(batch):
        if None in sizes_read[index * values_each : (index + 1) * values_each]:
            missed.add(block.prompt)
        elif block.prompt not in missed:
            found.append(index)
    return found


def _runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, stop) of those that follow one another."""
    if indexes:
        cuts = np.flatnonzero(np.diff(indexes) != 1) + 1
        for run in np.split(np.array(indexes), cuts):
            yield int(run[0]), int(run[-1]) + 1


def _places(batch: Sequence[_Block]) -> NDArray[np.int64]:
    return np.array([block.place for block in batch], np.int64)


def _outside(part: ValuePart, layers: range, own: range) -> bool:
    """Whether the rank has layers of this value that are not among `layers`."""
    return max(part.model_layers.start, own.start) < layers.start or min(part.model_layers.stop, own.stop) > layers.stop


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
        f"values: to put them, all engines that share the cache must have values=ValueShape(heads={len(heads)}, "
        f"layers={fitting_layers}), or divisors of these"
    )


def _stopwatch(deadline_s: float | None) -> Callable[[], float | None]:
    """Tells the time that is left for the whole of a call, None where it has none of its own. Raises InvalidArgument."""
    if deadline_s is None:
        return lambda: None
    check_deadline(deadline_s)
    return Deadline(deadline_s).left_s
