"""Promises of cache.py, on a real cluster: what one sharding put, any other reads."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client import Client
from kvstore.client.tensors.cache import TensorCache
from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.parts import ValueShape
from kvstore.client.tensors.pools import EnginePool
from kvstore.client.tensors.prompts import PromptSequence
from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.orders import ORDERS
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.settings import Size
from tests.client.processes import cluster
from tests.devices import needs_cuda

BLOCKS = 5
SPEC = CacheSpec(layers=4, kv_heads=4, head_dim=16, heads=8, dtype="bfloat16", block_tokens=16)
LATENT = CacheSpec(layers=4, kv_heads=1, head_dim=24, heads=8, attention=Attention.MLA, dtype="float32", block_tokens=16)
TP2_PP2 = Parallel(tp=2, pp=2)
READERS = (
    Parallel(),
    Parallel(tp=2),
    Parallel(tp=4),
    Parallel(pp=4),
    Parallel(tp=8),
    Parallel(tp=4, pp=3),
    Parallel(tp=8, dp=4),
    Parallel(pp=2, layer_split=(1, 3)),
)
THREE_BLOCKS = TensorSettings(staging_bytes=Size(3 * SPEC.block_bytes))
_serial = itertools.count()


SINGLE = ValueShape()


class Engine:
    """All ranks of one executor."""

    def __init__(self, client: Client, spec: CacheSpec, namespace: Namespace, parallel: Parallel, values: ValueShape = SINGLE) -> None:
        self.layout = CacheLayout(spec=spec, parallel=parallel, pool_blocks=1)
        self.ranks = [TensorCache(client, spec, namespace, parallel=parallel, rank=rank, values=values) for rank in range(parallel.ranks)]

    def shard(self, cache: Any, rank: int) -> Any:
        """A view of what `rank` has of the whole model's `cache`."""
        layers, heads = self.layout.rank_layers(rank), self.layout.rank_heads(rank)
        return cache[
            self.layout.parallel.coordinates(rank).cp :: self.layout.parallel.cp, layers.start : layers.stop, :, heads.start : heads.stop
        ]

    def put(self, tokens: Sequence[int], cache: Any) -> list[int]:
        return [rank.put_tensor(tokens, self.shard(cache, number)) for number, rank in enumerate(self.ranks)]

    def get(self, tokens: Sequence[int], like: Any) -> Any:
        """The whole cache, put together from what each rank got; all of them got all of it, and ranks with the same heads the same."""
        whole = torch.full_like(like, torch.nan)
        for number, rank in enumerate(self.ranks):
            shard = self.shard(whole, number)
            out = torch.empty_like(shard)
            assert rank.match_prefix(tokens) == len(out)
            assert rank.get_tensor(tokens, out) == len(out)
            assert shard.isnan().all() or shard.equal(out)
            shard.copy_(out)
        return whole


def fresh(spec: CacheSpec = SPEC, *, blocks: int = BLOCKS, **changes: Any) -> tuple[list[int], Any, Namespace]:
    """Tokens, the whole cache of their blocks, and a namespace that no other test uses."""
    serial = next(_serial)
    shape = (blocks, spec.layers, spec.kv_factor, spec.kv_heads, spec.block_tokens, spec.head_dim)
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(serial)).to(getattr(torch, spec.dtype))
    tokens = list(range(blocks * spec.block_tokens + 3))
    return tokens, cache, Namespace(model=f"m{serial}", dtype=spec.dtype, block_tokens=spec.block_tokens, **changes)


def whole_error(spec: CacheSpec, got: Any, cache: Any) -> float:
    """The largest error as a share of the largest element."""
    return float((got.float() - cache.float()).abs().max() / cache.float().abs().max())


# --- shardings ---


@pytest.mark.parametrize("parallel", READERS, ids=str)
def test_what_tp2_x_pp2_put_every_sharding_reads_to_the_bit(client: Client, parallel: Parallel) -> None:
    tokens, cache, namespace = fresh()
    groups = ValueShape(heads=2, layers=2)
    assert Engine(client, SPEC, namespace, TP2_PP2, values=groups).put(tokens, cache) == [BLOCKS] * 4
    assert Engine(client, SPEC, namespace, parallel, values=groups).get(tokens, cache).equal(cache)


def test_a_latent_that_all_ranks_hold_is_put_once(client: Client) -> None:
    tokens, cache, namespace = fresh(LATENT)
    writer = Engine(client, LATENT, namespace, Parallel(tp=4, pp=2), values=ValueShape(layers=2))
    assert writer.put(tokens, cache) == [BLOCKS, 0, 0, 0] * 2
    assert Engine(client, LATENT, namespace, Parallel(tp=2), values=ValueShape(layers=2)).get(tokens, cache).equal(cache)


def test_each_attention_dp_group_puts_its_own_sequences(client: Client) -> None:
    tokens, cache, namespace = fresh()
    engine = Engine(client, SPEC, namespace, Parallel(tp=4, dp=2), values=ValueShape(heads=2))
    assert [engine.ranks[rank].put_tensor(tokens, engine.shard(cache, rank)) for rank in (2, 3)] == [BLOCKS, BLOCKS]
    assert Engine(client, SPEC, namespace, Parallel(), values=ValueShape(heads=2)).get(tokens, cache).equal(cache)


def test_context_parallel_ranks_put_and_read_every_cp_th_block(client: Client) -> None:
    tokens, cache, namespace = fresh()
    engine = Engine(client, SPEC, namespace, Parallel(cp=2))
    assert engine.put(tokens, cache) == [3 * 4, 2 * 4]
    assert engine.get(tokens, cache).equal(cache)
    assert Engine(client, SPEC, namespace, Parallel(tp=2)).get(tokens, cache).equal(cache)


def test_rank_without_whole_values_reads_but_cannot_put(client: Client) -> None:
    tokens, cache, namespace = fresh()
    Engine(client, SPEC, namespace, Parallel(), values=ValueShape(heads=4)).put(tokens, cache)
    reader = Engine(client, SPEC, namespace, TP2_PP2, values=ValueShape(heads=4))
    assert reader.get(tokens, cache).equal(cache)
    for rank, layers in ((0, "0 to 1"), (3, "2 to 3")):
        with pytest.raises(InvalidArgument, match=rf"layers {layers} .* values=ValueShape\(heads=2, layers=2\)"):
            reader.ranks[rank].put_tensor(tokens, reader.shard(cache, rank))


# --- elements, strides and schemes ---


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_elements_of_every_type_come_back_to_the_bit(client: Client, dtype: str) -> None:
    spec = replace(SPEC, dtype=dtype)
    tokens, cache, namespace = fresh(spec)
    rank = TensorCache(client, spec, namespace)
    assert rank.put_tensor(tokens, cache) == BLOCKS * 4
    out = torch.zeros_like(cache)
    assert rank.get_tensor(tokens, out) == BLOCKS
    assert out.view(torch.uint8).equal(cache.view(torch.uint8))


@pytest.mark.parametrize(
    ("scheme", "error"),
    [
        ("int8", 0.006),
        ("int8a", 0.006),
        ("fp8-head", 0.066),
        ("fp8-tensor", 0.066),
        ("int4/16", 0.06),
        ("k=int8,v=int4/32", 0.06),
        ("k=none,v=int2/16", 0.3),
    ],
)
def test_quantised_blocks_are_within_the_scheme_error(client: Client, scheme: str, error: float) -> None:
    spec = replace(SPEC, head_dim=32, scheme=CacheScheme.parse(scheme))
    tokens, cache, namespace = fresh(spec)
    groups = ValueShape(heads=2, layers=2)
    Engine(client, spec, namespace, TP2_PP2, values=groups).put(tokens, cache)
    got = [
        Engine(client, spec, namespace, parallel, groups).get(tokens, cache) for parallel in (Parallel(), Parallel(tp=4), Parallel(pp=4))
    ]
    assert 0 < whole_error(spec, got[0], cache) < error
    assert all(other.equal(got[0]) for other in got[1:])


def test_blocks_of_another_scheme_or_other_groups_are_not_found(client: Client) -> None:
    tokens, cache, namespace = fresh()
    Engine(client, SPEC, namespace, Parallel()).put(tokens, cache)
    int8 = replace(SPEC, scheme=CacheScheme.parse("int8"))
    for other in (
        TensorCache(client, int8, namespace),
        TensorCache(client, SPEC, namespace, values=ValueShape(heads=2)),
        TensorCache(client, SPEC, namespace, values=ValueShape(layers=2)),
        TensorCache(client, SPEC, replace(namespace, revision="2")),
    ):
        assert other.match_prefix(tokens) == 0
        assert other.get_tensor(tokens, torch.empty_like(cache)) == 0


def test_nvme_quantised_blocks_are_within_the_scheme_error(tmp_path: Path) -> None:
    spec = replace(SPEC, dtype="float32", layers=32)
    tokens, cache, namespace = fresh(spec, blocks=8)
    with cluster(tmp_path) as started:
        started.start_node("--dram", "4MiB", "--nvme", f"{tmp_path}/nvme:64MiB", "--nvme-codec", "int8", "--demotion-wait-s", "60")
        with Client(started.address) as client:
            rank = TensorCache(client, spec, namespace)
            assert rank.put_tensor(tokens, cache) == 8 * 4
            others = [b"others %d" % number for number in range(64)]
            client.put_batch(others, [bytes(spec.block_bytes // 4)] * len(others))
            out = torch.zeros_like(cache)
            assert rank.get_tensor(tokens, out) == 8
            assert client.stats().hits_by_tier["nvme"] > 0
    assert 0 < whole_error(spec, out, cache) < 0.006


# --- prefixes, misses and batches ---


def keys_of(namespace: Namespace, tokens: Sequence[int], spec: CacheSpec) -> list[bytes]:
    """The keys of one rank with one head and all layers a value, block by block."""
    heads = [replace(namespace, heads=(head, spec.kv_heads), layers=(0, spec.layers)) for head in range(spec.kv_heads)]
    return [key for of_block in zip(*(one.block_keys(tokens) for one in heads), strict=True) for key in of_block]


def test_missing_value_ends_the_prefix(client: Client) -> None:
    tokens, cache, namespace = fresh()
    Engine(client, SPEC, namespace, Parallel()).put(tokens, cache)
    assert client.remove([keys_of(namespace, tokens, SPEC)[2 * 4 + 3]]) == 1  # head 3 of the third block
    for parallel, rank, expected in ((Parallel(), 0, 2), (Parallel(tp=2), 0, BLOCKS), (Parallel(tp=2), 1, 2)):
        engine = Engine(client, SPEC, namespace, parallel)
        shard = engine.shard(cache, rank)
        out = torch.full_like(shard, 7.0)
        assert engine.ranks[rank].match_prefix(tokens) == expected
        assert engine.ranks[rank].get_tensor(tokens, out) == expected
        assert out[:expected].equal(shard[:expected])
        assert (out[expected:] == 7.0).all()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_scattered_pool_blocks_are_put_and_read_in_place(client: Client, kind: str) -> None:
    tokens, cache, namespace = fresh(blocks=6)
    pool: Any = torch.randn(9, *cache.shape[1:]).to(torch.bfloat16).view(torch.uint16).numpy()
    pool, wanted = (torch.from_numpy(pool).view(torch.bfloat16), cache) if kind == "torch" else (pool, cache.view(torch.uint16).numpy())
    places = [7, 2, 3, 4, 0, 8]
    pool[places] = wanted
    rank = TensorCache(client, SPEC, namespace, settings=THREE_BLOCKS)
    assert rank.put_tensor(tokens, pool, blocks=places) == 6 * 4
    before, places = torch.as_tensor(pool).clone(), [1, 2, 6, 0, 3]
    assert rank.get_tensor(tokens, pool, blocks=np.array(places), first_block=1) == 5
    assert bool((pool[places] == wanted[1:]).all())
    assert bool((torch.as_tensor(pool) == before)[[4, 5, 7, 8]].all())
    assert rank.put_tensor(tokens, pool, blocks=[]) == rank.get_tensor(tokens, pool, blocks=[]) == 0


def test_each_value_names_its_parent(address: str) -> None:
    class Noting(Client):
        def put_batch(self, keys: Sequence[bytes], values: Sequence[Any], **others: Any) -> list[bool]:
            noted.update(zip(keys, others["parents"], strict=True))
            assert others["namespace"] == namespace
            return super().put_batch(keys, values, **others)

    noted: dict[bytes, bytes | None] = {}
    tokens, cache, namespace = fresh()
    with Noting(address) as other:
        TensorCache(other, SPEC, namespace).put_tensor(tokens, cache)
    keys = keys_of(namespace, tokens, SPEC)
    assert noted == dict(zip(keys, [*[None] * 4, *keys[:-4]], strict=True))


# --- misuse ---


def test_other_arguments_out_of_range_are_refused(client: Client) -> None:
    tokens, cache, namespace = fresh()
    rank = TensorCache(client, SPEC, namespace)
    for call in (rank.put_tensor, rank.get_tensor):
        for first_block in (-1, 0.5):
            with pytest.raises(InvalidArgument, match="first_block is 0 or more"):
                call(tokens, cache, first_block=first_block)  # type: ignore[arg-type]
        for blocks in ([BLOCKS], [-1], [0.5], [[0]], "0"):
            with pytest.raises(InvalidArgument, match="blocks must be a flat list of block numbers from 0 to 4"):
                call(tokens, cache, blocks=blocks)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="deadline_s is a number"):
            call(tokens, cache, deadline_s=0)
        with pytest.raises(InvalidArgument, match="token ids"):
            call("text", cache)
    read_only = np.zeros(cache.shape, np.uint16)
    read_only.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        rank.get_tensor(tokens, read_only)
    int8 = TensorCache(client, replace(SPEC, scheme=CacheScheme.parse("int8")), namespace)
    with pytest.raises(InvalidArgument, match="cannot be encoded as int8: give a torch tensor"):
        int8.put_tensor(tokens, np.zeros(cache.shape, np.uint16))
    with pytest.raises(InvalidArgument, match="rank 4 is outside"):
        TensorCache(client, SPEC, namespace, parallel=TP2_PP2, rank=4)


def test_foreign_values_are_refused(client: Client) -> None:
    tokens, cache, namespace = fresh()
    rank = TensorCache(client, SPEC, namespace)
    rank.put_tensor(tokens, cache)
    keys = keys_of(namespace, tokens, SPEC)
    right = client.get(keys[0])
    assert right is not None
    elsewhere = TensorCache(client, replace(SPEC, layers=2), namespace)
    elsewhere.put_tensor(tokens, cache[:, :2])
    fewer_layers = client.get(keys_of(namespace, tokens, replace(SPEC, layers=2))[0])
    for wrong in (b"x", b"x" * len(right), right[:-1], fewer_layers):
        client.remove(keys[:1])
        client.put(keys[0], wrong)
        with pytest.raises(ProtocolError):
            rank.get_tensor(tokens, torch.empty_like(cache))


# --- pools as engines have them ---


def engine_pool(order: str, spec: CacheSpec, *, blocks: int = 8, kind: str = "torch", **sizes: Any) -> EnginePool:
    """Of rank 0, all zeros."""
    layout = CacheLayout(spec=spec, parallel=Parallel(**sizes), pool_blocks=blocks, order=order)
    counts = [layout.region_bytes(0, number) for number in range(layout.region_count(0))]
    return EnginePool(layout, [torch.zeros(count, dtype=torch.uint8) if kind == "torch" else np.zeros(count, np.uint8) for count in counts])


def content(pool: EnginePool, blocks: Sequence[int]) -> Any:
    """The contents of these pool blocks, as one tensor."""
    first = pool.planes[0].values
    layers, kinds = (max(getattr(plane, axis).stop for plane in pool.planes) for axis in ("layers", "kinds"))
    whole = torch.zeros(len(blocks), layers, kinds, *first.shape[3:])
    for plane in pool.planes:
        whole[:, plane.layers.start : plane.layers.stop, plane.kinds.start : plane.kinds.stop] = torch.as_tensor(plane.values[list(blocks)])
    return whole


@pytest.mark.promise("value-layouts")
@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("order", ORDERS)
def test_pools_of_every_order_are_put_and_read_where_they_are(client: Client, order: str, kind: str) -> None:
    """A list of tensors, one a layer; K and V apart or together; transposed or not: all share what a plain tensor put, and back."""
    spec = replace(SPEC, dtype="float32")
    tokens, cache, namespace = fresh(spec)
    rank = TensorCache(client, spec, namespace)
    assert rank.put_tensor(tokens, cache) == BLOCKS * 4
    pool, table = engine_pool(order, spec, kind=kind), [6, 1, 2, 3, 0]
    assert rank.get_tensor(tokens, pool, blocks=table) == BLOCKS
    assert content(pool, table).equal(cache)
    assert not content(pool, [4, 5, 7]).any()
    again = TensorCache(client, spec, replace(namespace, revision="again"))
    assert again.put_tensor(tokens, pool, blocks=table) == BLOCKS * 4
    out = torch.zeros_like(cache)
    assert again.get_tensor(tokens, out) == BLOCKS
    assert out.equal(cache)


def test_pool_shares_with_other_shardings_and_orders(client: Client) -> None:
    tokens, cache, namespace = fresh()
    groups = ValueShape(heads=2, layers=2)
    Engine(client, SPEC, namespace, Parallel(), values=groups).put(tokens, cache)
    engine = Engine(client, SPEC, namespace, TP2_PP2, values=groups)
    pool = engine_pool("vllm-cpu", SPEC, tp=2, pp=2)
    assert engine.ranks[0].get_tensor(tokens, pool, blocks=range(BLOCKS)) == BLOCKS
    assert content(pool, range(BLOCKS)).equal(engine.shard(cache, 0).float())
    with pytest.raises(InvalidArgument, match="the pool is one of another model, or of another rank's"):
        engine.ranks[1].get_tensor(tokens, pool)
    int8 = TensorCache(client, replace(SPEC, scheme=CacheScheme.parse("int8")), namespace)
    with pytest.raises(InvalidArgument, match="a numpy array cannot be encoded as int8"):
        int8.put_tensor(tokens, engine_pool("vllm-cpu", SPEC, kind="numpy"), blocks=range(BLOCKS))


# --- many sequences ---


def test_many_sequences_of_one_pool_are_one_message_each_way(client: Client) -> None:
    _, cache, namespace = fresh(blocks=9)
    first, second, third = (list(range(start, start + 3 * 16)) for start in (0, 1000, 2000))
    rank = TensorCache(client, SPEC, namespace)
    prompts = [
        PromptSequence(first, [8, 0, 4]),
        PromptSequence(second, [1, 7, 2]),
        PromptSequence(third, [5, 6], 0),
        PromptSequence([], []),
    ]
    before = client.stats().requests
    assert rank.put_batch(prompts, cache) == [12, 12, 8, 0]
    assert client.stats().requests == before + 1
    assert rank.match_batch(
        [*prompts, PromptSequence(first, first_block=2), PromptSequence(third, first_block=2), PromptSequence([5] * 16)]
    ) == [
        3,
        3,
        2,
        0,
        1,
        0,
        0,
    ]
    out = torch.zeros_like(cache)
    tables = [[0, 1, 2], [3, 4, 5], [6, 7]]
    read = [PromptSequence(names, table) for names, table in zip((first, second, third), tables, strict=True)]
    before = client.stats().requests
    assert rank.get_batch(read, out) == [3, 3, 2]
    assert client.stats().requests <= before + 1
    assert out[:8].equal(cache[[8, 0, 4, 1, 7, 2, 5, 6]])
    assert rank.put_batch([], cache) == rank.get_batch([], cache) == rank.match_batch([]) == []


@pytest.mark.promise("value-layouts")
def test_a_miss_ends_its_own_sequence_and_no_other(client: Client) -> None:
    _, cache, namespace = fresh(blocks=9)
    sequences = [list(range(start, start + 3 * 16)) for start in (0, 1000, 2000)]
    for settings in (None, THREE_BLOCKS):
        rank = TensorCache(client, SPEC, namespace, settings=settings)
        rank.put_batch([PromptSequence(names, range(3 * at, 3 * at + 3)) for at, names in enumerate(sequences)], cache)
        client.remove([keys_of(namespace, sequences[1], SPEC)[1 * 4 + 2]])
        out = torch.full_like(cache, 7.0)
        table = [range(3), range(3, 6), range(6, 9)]
        assert rank.get_batch([PromptSequence(names, of_prompt) for names, of_prompt in zip(sequences, table, strict=True)], out) == [
            3,
            1,
            3,
        ]
        assert out[[0, 1, 2, 3, 6, 7, 8]].equal(cache[[0, 1, 2, 3, 6, 7, 8]])
        assert (out[[4, 5]] == 7.0).all()


def test_common_prefix_is_put_once(client: Client) -> None:
    _, cache, namespace = fresh(blocks=4)
    shared = list(range(32))
    ours, theirs = [*shared, *[1] * 16], [*shared, *[2] * 16]
    cache[3] = cache[1]  # the second sequence's own copy of the second block
    rank = TensorCache(client, SPEC, namespace)
    assert rank.put_batch([PromptSequence(shared, [0, 1]), PromptSequence(ours, [0, 1, 2]), PromptSequence(theirs, [0, 3, 1])], cache) == [
        8,
        4,
        4,
    ]
    out = torch.zeros(6, *cache.shape[1:], dtype=cache.dtype)
    assert rank.get_batch([PromptSequence(ours, [0, 1, 2]), PromptSequence(theirs, [3, 4, 5])], out) == [3, 3]
    assert out.equal(cache[[0, 1, 2, 0, 3, 1]])


def test_shared_block_is_sent_before_its_successors(address: str) -> None:
    class Noting(Client):
        def put_batch(self, keys: Sequence[bytes], values: Sequence[Any], **others: Any) -> list[bool]:
            sent.extend(zip(keys, others["parents"], strict=True))
            return super().put_batch(keys, values, **others)

    sent: list[tuple[bytes, bytes | None]] = []
    _, cache, namespace = fresh(blocks=4)
    ours, theirs = [*[0] * 32, *[1] * 16], [*[0] * 32, *[2] * 16]
    with Noting(address) as other:
        rank = TensorCache(other, SPEC, namespace, values=ValueShape(heads=4))
        assert rank.put_batch([PromptSequence(ours, [0, 1, 2]), PromptSequence(theirs, [0, 1, 3])], cache) == [3, 1]
    for number, (_, parent) in enumerate(sent):
        assert parent is None or parent in [key for key, _ in sent[:number]]


# --- names ---


# --- groups of layers ---


def test_layers_are_put_and_read_as_they_are_computed(client: Client) -> None:
    tokens, cache, namespace = fresh()
    rank = TensorCache(client, SPEC, namespace, values=ValueShape(layers=2))
    reader = TensorCache(client, SPEC, namespace, parallel=Parallel(pp=2, layer_split=(1, 3)), rank=1, values=ValueShape(layers=2))
    assert rank.put_tensor(tokens, cache, layers=range(2)) == BLOCKS * 4
    assert (rank.match_prefix(tokens), rank.match_prefix(tokens, layers=range(2))) == (0, BLOCKS)
    out, pool = torch.zeros_like(cache), engine_pool("vllm-flash", SPEC, blocks=BLOCKS)
    assert rank.get_tensor(tokens, out, layers=range(2)) == rank.get_tensor(tokens, pool, layers=range(2)) == BLOCKS
    assert out[:, :2].equal(cache[:, :2])
    assert not out[:, 2:].any()
    assert content(pool, range(BLOCKS)).equal(out.float())
    part = torch.zeros_like(cache[:, 1:])
    assert reader.get_tensor(tokens, part, layers=range(1, 2)) == BLOCKS, "of a group it has a layer only"
    assert part[:, :1].equal(cache[:, 1:2])
    assert rank.put_tensor(tokens, cache, layers=range(2, 4)) == BLOCKS * 4
    assert rank.get_tensor(tokens, out) == reader.get_tensor(tokens, part) == BLOCKS
    assert out.equal(cache)
    assert part.equal(cache[:, 1:])


# --- threads ---


# --- GPUs ---


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_gpu_blocks_are_put_after_their_kernels(client: Client, scheme: str) -> None:
    spec = replace(SPEC, scheme=CacheScheme.parse(scheme))
    tokens, cache, namespace = fresh(spec)
    expected = torch.zeros_like(cache)
    plain = TensorCache(client, spec, replace(namespace, revision="cpu"))
    plain.put_tensor(tokens, cache)
    plain.get_tensor(tokens, expected)
    layout = CacheLayout(spec=SPEC, pool_blocks=8, order="vllm-flash")
    layers = [torch.zeros(2, 8, 16, 4, 16, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    pool, rank = EnginePool(layout, layers), TensorCache(client, spec, namespace)
    computed = cache.cuda()
    torch.cuda._sleep(500_000_000)  # what the engine computes is late
    for number, layer in enumerate(layers):
        layer[:, 1:6] = computed[:, number].permute(1, 0, 3, 2, 4)
    assert rank.put_tensor(tokens, pool, blocks=[1, 2, 3, 4, 5]) == BLOCKS * 4
    assert rank.get_tensor(tokens, pool, blocks=[7, 0, 1, 6, 2]) == BLOCKS
    for number, layer in enumerate(layers):
        got = layer[:, [7, 0, 1, 6, 2]].permute(1, 0, 3, 2, 4).cpu()
        assert torch.allclose(got, expected[:, number], rtol=0.02, atol=0.02)
