"""Pools in any memory order as values, whole and by KV heads, against slices by torch; put at one TP and read at another, with a store."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.cli.tools.cluster import ClusterPlan
from kvstore.client import Client
from kvstore.engines.head_split import head_split
from kvstore.engines.vllm.identity import Variant
from kvstore.engines.vllm.plan import BlockTransfer, StepPlan
from kvstore.engines.vllm.pools import CHUNK_BYTES, ChunkStaging, HeadPools, HeadShards, LayerPools, head_slices, rows
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.worker import RankGroup, Worker
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError
from tests.client.embedded import embedded
from tests.devices import DEVICE, needs_cuda
from tests.engines.put_client import PutClient
from tests.engines.vllm.test_worker import await_loads

BLOCKS, HEADS, TOKENS, ELEMENTS, LAYERS = 7, 8, 4, 6, 3
TABLE = [5, 0, 3]
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""Of vLLM: layers, blocks, KV heads, tokens, elements of K and V."""
NUMBERS = itertools.count()


def pools(order: str, heads: int = HEADS, seed: int = 0, elements: int = ELEMENTS, device: Any = "cpu") -> list[torch.Tensor]:
    """Layers seen as [B, H, N, C], in one piece of memory of the order of `order`, full of random numbers."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": heads, "N": TOKENS, "C": elements}
    memory = torch.randn([sizes[axis] for axis in order], generator=torch.Generator().manual_seed(seed)).to(device)
    return list(memory.permute([order.index(axis) for axis in "LBHNC"]))


def head_pools(layers: list[torch.Tensor], count: int, *, copies_on_device: bool = False) -> HeadPools:
    slices = [head_slices(layer, layer.shape[1], count) for layer in layers]
    return HeadPools(
        [LayerPools([of_layer[value] for of_layer in slices], BLOCKS, copies_on_device=copies_on_device) for value in range(count)]
    )


def gathered(source: LayerPools | HeadPools, table: list[int] = TABLE) -> torch.Tensor:
    values = torch.zeros(len(table), source.values_per_block * source.value_bytes, dtype=torch.uint8)
    source.gather(table, values)
    return values


def oracle(layers: list[torch.Tensor], block: int, heads: slice, order: str) -> bytes:
    """A value: of each layer the heads, in memory order."""
    is_tokens_first = order.index("N") < order.index("H")
    parts = [layer[block, heads].transpose(0, 1) if is_tokens_first else layer[block, heads] for layer in layers]
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


@pytest.mark.parametrize("copies_on_device", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_pools_values_move_between_blocks(order: str, *, copies_on_device: bool) -> None:
    """A value has the heads of all layers, in their own order; other blocks are left alone."""
    layers = pools(order)
    for count in (1, 4):
        source = head_pools(layers, count, copies_on_device=copies_on_device)
        values = gathered(source)
        each = HEADS // count
        for row, block in zip(values, TABLE, strict=True):
            wanted = b"".join(oracle(layers, block, slice(value * each, (value + 1) * each), order) for value in range(count))
            assert row.numpy().tobytes() == wanted
        copies = [torch.zeros_like(layer, memory_format=torch.preserve_format) for layer in layers]
        head_pools(copies, count, copies_on_device=copies_on_device).scatter(values, [1, 2, 6])
        for layer, copy in zip(layers, copies, strict=True):
            assert torch.equal(copy[[1, 2, 6]], layer[TABLE])
            assert not copy[[0, 3, 4, 5]].any()


def test_pools_layers_of_many_kinds_are_one_value() -> None:
    kinds = [*pools("LBHNC"), torch.arange(BLOCKS * 3, dtype=torch.uint8).view(BLOCKS, 3), *(each.bfloat16() for each in pools("BLHNC"))]
    copies = [torch.zeros_like(layer) for layer in kinds]
    LayerPools(copies, BLOCKS).scatter(gathered(LayerPools(kinds, BLOCKS)), TABLE)
    for layer, copy in zip(kinds, copies, strict=True):
        assert torch.equal(copy[TABLE], layer[TABLE])


def test_pools_kernel_blocks_are_one_block() -> None:
    """A backend whose kernels take smaller blocks has several of them side by side for one of the manager's."""
    small = torch.randn(BLOCKS * 2, HEADS, TOKENS // 2, ELEMENTS)
    wanted = [small[10:12, value * 2 : value * 2 + 2].contiguous() for value in range(4)]
    assert torch.equal(gathered(head_pools([small], 4), [5])[0].view(torch.float32), torch.cat([part.flatten() for part in wanted]))


def test_form_tells_what_blocks_have_in_common() -> None:
    """Orders of axes of equal size too; the form of a value by heads does not depend on TP."""
    forms = {order: LayerPools.form(pools(order)[0], BLOCKS) for order in ("LBHNC", "BLHNC", "LBNHC")}
    assert forms["LBHNC"] == forms["BLHNC"] == f"torch.float32 {[HEADS, TOKENS, ELEMENTS]} of [0, 1, 2]"
    assert forms["LBNHC"] != forms["LBHNC"], "tokens before heads"
    assert LayerPools.form(pools("LBHNC")[0].bfloat16(), BLOCKS) != forms["LBHNC"]
    square = torch.zeros(BLOCKS, 4, 4, 8)
    assert LayerPools.form(square, BLOCKS) != LayerPools.form(square.transpose(1, 2), BLOCKS)
    for order in ORDERS:
        by_tp = {LayerPools.form(head_slices(pools(order, HEADS // tp)[0], HEADS // tp, 8 // tp)[0], BLOCKS) for tp in (1, 2, 4, 8)}
        assert len(by_tp) == 1


def test_scatter_waits_for_its_copies_on_the_pools_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that loads has not chosen the device of its rank. The device without memory stands for any that is no CPU."""
    waited: list[object] = []
    monkeypatch.setattr("torch.accelerator.current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited.append(device)))
    layers = [torch.empty(BLOCKS, 4, 8, device="meta") for _ in range(LAYERS)]
    target = LayerPools(layers, BLOCKS)
    target.scatter(torch.zeros(len(TABLE), target.value_bytes, dtype=torch.uint8), TABLE)
    assert waited == [layers[0].device]


@pytest.mark.parametrize("count", [1, 4])
def test_pieces_are_the_memory_of_each_value(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = pools("BLHNC")
    assert head_pools(layers, count).pieces(TABLE) is None, "too small to pay"
    monkeypatch.setattr("kvstore.engines.vllm.pools.MIN_PIECE_BYTES", HEADS // count * TOKENS * ELEMENTS * 4)
    pieces = head_pools(layers, count).pieces(TABLE)
    assert pieces is not None
    each = HEADS // count
    wanted = [oracle(layers, block, slice(at * each, (at + 1) * each), "BLHNC") for block in TABLE for at in range(count)]
    assert [b"".join(piece.tobytes() for piece in value) for value in pieces] == wanted
    pieces[0][1][:] = 0
    assert not layers[1][TABLE[0], :each].any()
    assert layers[0][TABLE[0]].all()
    monkeypatch.setattr("kvstore.engines.vllm.pools.MIN_PIECE_BYTES", 1)
    assert head_pools(pools("LBHNC"), 4).pieces(TABLE) is not None
    assert head_pools(pools("LBNHC"), 4).pieces(TABLE) is None, "heads are no bytes in a row"
    assert LayerPools(layers, BLOCKS, copies_on_device=True).pieces(TABLE) is None


@pytest.mark.parametrize(
    ("layers", "says"),
    [([], "no KV cache"), ([torch.zeros(8, 2)], "not made of 7 blocks"), ([torch.zeros(BLOCKS, 4)[:, ::2]], "no axis of stride 1")],
)
def test_pools_of_no_blocks_are_refused(layers: list[torch.Tensor], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LayerPools(layers, BLOCKS)


@needs_cuda
@pytest.mark.gpu
def test_blocks_move_between_gpu_and_host() -> None:
    layers = [layer.cuda() for layer in pools("BLHNC")]
    copies = [torch.zeros_like(layer) for layer in layers]
    LayerPools(copies, BLOCKS).scatter(gathered(LayerPools(layers, BLOCKS)), TABLE)
    for layer, copy in zip(layers, copies, strict=True):
        assert torch.equal(copy[TABLE].cpu(), layer[TABLE].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_values_by_heads_are_equal_on_any_device(order: str) -> None:
    layers, there = pools(order), pools(order, device=DEVICE)
    for count in (1, 4):
        values = gathered(head_pools(layers, count))
        assert torch.equal(gathered(head_pools(there, count, copies_on_device=True)), values)
        copies = [torch.zeros_like(layer) for layer in there]
        head_pools(copies, count, copies_on_device=True).scatter(values, [1, 2, 6])
        for layer, copy in zip(layers, copies, strict=True):
            assert torch.equal(copy[[1, 2, 6]].cpu(), layer[TABLE])
            assert not copy[[0, 3, 4, 5]].any()


@pytest.mark.parametrize(("value_bytes", "values"), [(1 << 20, 16), ((1 << 20) + 1, 15), (CHUNK_BYTES, 1), (2 * CHUNK_BYTES, 1)])
def test_a_chunk_is_of_whole_values(value_bytes: int, values: int) -> None:
    staging = ChunkStaging(value_bytes, 0)
    chunk = staging.take()
    assert chunk is not None
    assert staging.values(value_bytes) == values
    assert rows(chunk, values, value_bytes).shape == (values, value_bytes)


def test_a_chunk_has_room_for_many_small_values() -> None:
    assert ChunkStaging(2 * CHUNK_BYTES, 0).values(1 << 20) == 32


def test_chunks_are_bounded_and_reused() -> None:
    staging = ChunkStaging(1 << 20, 2 * CHUNK_BYTES)
    first, second = staging.take(), staging.take()
    assert first is not None
    assert second is not None
    assert staging.take() is None
    staging.release(first)
    again = staging.take()
    assert again is not None
    assert again.data_ptr() == first.data_ptr() != second.data_ptr()


def test_take_succeeds_after_memory_was_short(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = ChunkStaging(1 << 20, CHUNK_BYTES)

    def no_memory(*_size: int, **_kind: object) -> None:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as without, pytest.raises(RuntimeError, match="not enough"):
        without.setattr("kvstore.engines.vllm.pools.torch.empty", no_memory)
        staging.take()
    assert staging.take() is not None
    assert staging.take() is None


@pytest.mark.parametrize(
    ("shape", "heads"),
    [((BLOCKS, 2, TOKENS, 48), 8), ((BLOCKS, 16, TOKENS, 6), 8), ((2, BLOCKS, TOKENS, 8, 6), 8), ((BLOCKS, 6, TOKENS, 12), 6)],
    ids=["a plane for K and one for V", "slots for K and V", "FlashAttention of older releases", "heads that are not divided"],
)
def test_layers_whose_heads_cannot_be_told_are_refused(shape: tuple[int, ...], heads: int) -> None:
    with pytest.raises(ConfigError, match="set share_tp to 0"):
        head_slices(torch.zeros(shape), heads, 4)


def test_keys_of_values_follow_one_another_block_by_block() -> None:
    base = Namespace(model="m", dtype="float32", block_tokens=4)
    shards = HeadShards.of_rank(base, head_split(4, kv_heads=8, tp=(1, 2))).of(Variant("w"))
    third, fourth = shards.shards
    assert [shard.namespace.heads for shard in shards.shards] == [(2, 4), (3, 4)]
    assert shards.keys([b"a", b"b"]) == [third.key(b"a"), fourth.key(b"a"), third.key(b"b"), fourth.key(b"b")]
    assert shards.namespace == head_split(4, kv_heads=8, tp=(0, 2)).label(replace(base, revision="w"))
    assert shards.canonical() == [third.namespace.canonical(), fourth.namespace.canonical()]
    assert shards.namespace.revision == "w"


class Engine:
    """The ranks of an engine: each has a worker over its share of the heads."""

    def __init__(self, address: str, namespace: Namespace, tp: int, share_tp: int, order: str, seed: int, elements: int = ELEMENTS) -> None:
        self.layers = pools(order, seed=seed, elements=elements)
        self.ranks: list[Worker] = []
        self.clients: list[PutClient] = []
        each = HEADS // tp
        self.parts = [[layer[:, rank * each : (rank + 1) * each].clone() for layer in self.layers] for rank in range(tp)]
        for rank in range(tp):
            split = head_split(share_tp, kv_heads=HEADS, tp=(rank, tp))
            group = RankGroup(HeadShards.of_rank(namespace, split), head_pools(self.parts[rank], split.count), is_writer=split.is_writer)
            self.clients.append(PutClient(address))
            self.ranks.append(Worker(self.clients[-1], [group], VllmSettings()))

    def save(self, transfer: BlockTransfer) -> None:
        for rank in self.ranks:
            rank.save(StepPlan(saves=[transfer]))
        for rank in self.ranks:
            rank.flush()

    def load(self, transfer: BlockTransfer) -> set[int]:
        """Blocks that did not come, of any rank."""
        for rank in self.ranks:
            rank.load(StepPlan(loads=[transfer], is_idle=True))
        for rank in self.ranks:
            await_loads(rank, {transfer.request_id})
        return set[int]().union(*(rank.take_failed() for rank in self.ranks))

    def blocks(self, table: list[int]) -> torch.Tensor:
        return torch.stack([torch.cat([part[layer][table] for part in self.parts], dim=1) for layer in range(LAYERS)])

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(model=f"heads-{next(NUMBERS)}", dtype="float32", block_tokens=TOKENS)


def hashes(count: int) -> list[bytes]:
    return [bytes([index + 1]) * 32 for index in range(count)]


@pytest.mark.parametrize(("share_tp", "order", "way"), [(1, "LBHNC", "staging"), (4, "LBNHC", "staging"), (8, "LBHNC", "in place")])
def test_what_any_tp_puts_any_tp_gets(
    address: str, namespace: Namespace, share_tp: int, order: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "in place":
        monkeypatch.setattr("kvstore.engines.vllm.pools.MIN_PIECE_BYTES", 1)
    sizes = [tp for tp in (1, 2, 4, 8) if not share_tp % tp]
    for writer_tp, reader_tp in itertools.product(sizes, sizes):
        own = Namespace(model=f"{namespace.model}-{writer_tp}-{reader_tp}", dtype="float32", block_tokens=TOKENS)
        writer = Engine(address, own, writer_tp, share_tp, order, seed=1)
        reader = Engine(address, own, reader_tp, share_tp, order, seed=2)
        writer.save(BlockTransfer("a", TABLE, hashes(3)))
        assert not reader.load(BlockTransfer("b", [2, 6, 1], hashes(3)))
        assert torch.equal(reader.blocks([2, 6, 1]), writer.blocks(TABLE))
        assert torch.equal(reader.blocks([0, 3, 4, 5]), torch.stack([layer[[0, 3, 4, 5]] for layer in reader.layers]))
        loaded = [rank.take_counters() for rank in reader.ranks]
        assert [counters.loaded_blocks for counters in loaded] == [3] * reader_tp
        assert sum(counters.loaded_bytes for counters in loaded) == 3 * LAYERS * HEADS * TOKENS * ELEMENTS * 4
        assert [rank.take_counters().saved_blocks for rank in writer.ranks] == [3] * writer_tp
        writer.close()
        reader.close()


def test_a_block_without_one_of_its_values_is_not_loaded(address: str, namespace: Namespace) -> None:
    lost = 5
    writer, reader = Engine(address, namespace, 1, 8, "LBHNC", 1), Engine(address, namespace, 2, 8, "LBHNC", 2)
    writer.save(BlockTransfer("a", TABLE, hashes(3)))
    value = HeadShards.of_rank(namespace, head_split(8, kv_heads=8, tp=(0, 1))).shards[lost]
    assert writer.clients[0].remove([value.key(hashes(3)[1])])
    assert reader.load(BlockTransfer("b", [2, 6, 1], hashes(3))) == {6, 1}
    assert sorted(rank.take_counters().loaded_blocks for rank in reader.ranks) == [1, 3], "the other rank has all of its values"
    writer.save(BlockTransfer("c", [TABLE[1]], hashes(3)[1:2], parent=hashes(3)[0]))
    assert not reader.load(BlockTransfer("d", [2, 6, 1], hashes(3)))
    writer.close()
    reader.close()


def test_values_have_that_of_the_block_before_as_their_parent(address: str, namespace: Namespace) -> None:
    writer = Engine(address, namespace, 2, 4, "LBHNC", 1)
    writer.save(BlockTransfer("a", [1, 2], hashes(3)[1:], parent=hashes(1)[0]))
    for rank, client in enumerate(writer.clients):
        shards = HeadShards.of_rank(namespace, head_split(4, kv_heads=HEADS, tp=(rank, 2)))
        keys = shards.keys(hashes(3)[1:])
        assert client.puts == [(keys, [*shards.keys(hashes(1)), *keys[:2]], shards.namespace)]
    writer.close()


def test_nodes_evict_the_values_of_a_block_together(namespace: Namespace) -> None:
    """Of prompts of 10 blocks, which need four times what the node has: all are whole or gone but the one that is being evicted."""
    plan = ClusterPlan(dram="4MiB", nvme="", is_private=True)
    with embedded(plan) as cluster, Client(cluster.address) as client:
        writer, reader = (Engine(cluster.address, namespace, tp, 8, "LBHNC", 1, 128) for tp in (2, 1))
        prompts = [[bytes([number, place]) * 16 for place in range(10)] for number in range(35)]
        for number, of_prompt in enumerate(prompts):
            for start in (0, 5):
                parent = of_prompt[start - 1] if start else None
                writer.save(BlockTransfer("a", [0, 1, 2, 3, 4], of_prompt[start : start + 5], parent))
            if number % 3 == 0:
                reader.load(BlockTransfer("b", [0, 1, 2, 3], prompts[number // 2][:4]))
        shards = HeadShards.of_rank(namespace, head_split(8, kv_heads=HEADS, tp=(0, 1)))
        found = [client.exists_batch(shards.keys(of_prompt)) for of_prompt in prompts]
        counts = [sum(of_prompt[start : start + 8]) for of_prompt in found for start in range(0, 80, 8)]
        assert counts.count(8) > 50
        assert counts.count(0) > 200
        assert len(counts) - counts.count(8) - counts.count(0) <= 4, "a block that is leaving, of each of the orders of leaving"
        writer.close()
        reader.close()
