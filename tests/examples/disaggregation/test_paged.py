"""disaggregation/paged.py: attention reads the values that it appended, in any order and size; records hold the computed values."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from disaggregation.llama import Tensor  # noqa: E402
from disaggregation.paged import PagedCache, Pool, new_cache  # noqa: E402

from kvstore.kvcache.codecs.codec import decode, encode  # noqa: E402
from kvstore.kvcache.codecs.schemes import CacheScheme  # noqa: E402
from kvstore.kvcache.layouts.layout import CacheLayout  # noqa: E402
from kvstore.kvcache.layouts.parallel import Parallel  # noqa: E402
from kvstore.kvcache.models.spec import CacheSpec  # noqa: E402
from kvstore.transfer.memory.mapped_memory import allocate  # noqa: E402

pytestmark = pytest.mark.slow

TOKENS = 40
RANK = 1  # of two stages: layers 2 and 3


def pool_of(scheme: str, *, block_tokens: int, order: str = "HND") -> Pool:
    spec = CacheSpec(
        layers=4, heads=4, kv_heads=2, head_dim=32, dtype="float32", block_tokens=block_tokens, scheme=CacheScheme.parse(scheme)
    )
    layout = CacheLayout(spec=spec, parallel=Parallel(pp=2), pool_blocks=16, order=order)
    return Pool(layout, RANK, allocate(layout.region_bytes(RANK, 0)))


def computed(seed: int) -> Tensor:
    """[layer, kv, 1, heads, tokens, head_dim]."""
    return torch.randn(2, 2, 1, 2, TOKENS, 32, generator=torch.Generator().manual_seed(seed))


def append(cache: PagedCache, values: Tensor, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
    new = values[..., start:stop, :]
    found = [cache.update(new[layer, 0], new[layer, 1], 2 + layer) for layer in range(2)]
    cache.tokens = stop
    return found


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("block_tokens", [8, 16, 32])
def test_all_that_was_appended_comes_back(order: str, block_tokens: int) -> None:
    pool = pool_of("none", block_tokens=block_tokens, order=order)
    caches = [new_cache(pool, capacity_tokens=TOKENS) for _ in range(2)]
    for start, stop in ((0, 19), (19, 20), (20, TOKENS)):  # two sequences by turns
        for seed, cache in enumerate(caches):
            for layer, (keys, values) in enumerate(append(cache, computed(seed), start, stop)):
                assert torch.equal(torch.stack([keys, values]), computed(seed)[layer, ..., :stop, :])
    for seed, cache in enumerate(caches):
        assert torch.equal(cache.contents(), computed(seed)[:, :, 0])


def test_a_value_lies_where_the_layout_says() -> None:
    pool = pool_of("none", block_tokens=16, order="NHD")
    cache = new_cache(pool, capacity_tokens=TOKENS)
    append(cache, computed(0), 0, TOKENS)
    memory = pool.values.untyped_storage()
    region, offset_bytes = pool.layout.locate(RANK, 3, 1, 1, cache.blocks[2], 5)
    floats = torch.frombuffer(bytearray(memory[offset_bytes : offset_bytes + 128]), dtype=torch.float32)
    assert region == 0
    assert torch.equal(floats, computed(0)[1, 1, 0, 1, 37])


@pytest.mark.parametrize("scheme", ["int8", "int4/32"])
def test_full_blocks_are_records_while_attention_sees_values(scheme: str) -> None:
    pool = pool_of(scheme, block_tokens=32)
    cache = new_cache(pool, capacity_tokens=TOKENS)
    append(cache, computed(0), 0, 20)
    assert cache.contents().shape[3] == 0, "no block is full"
    for layer, (keys, _) in enumerate(append(cache, computed(0), 20, TOKENS)):
        assert torch.equal(keys, computed(0)[layer, 0])
    spec = pool.layout.spec
    for kv in range(2):
        expected = encode(computed(0)[:, kv, 0, :, :32], spec.scheme.of(kv == 0), is_key=kv == 0)
        assert torch.equal(cache.contents()[:, kv, :, 0], expected)


@pytest.mark.parametrize("scheme", ["int8", "int4/32"])
def test_blocks_that_came_from_elsewhere_are_decoded(scheme: str) -> None:
    pool = pool_of(scheme, block_tokens=32)
    here, there = new_cache(pool, capacity_tokens=TOKENS), new_cache(pool, capacity_tokens=TOKENS)
    append(here, computed(0), 0, 32)
    pool.values[there.blocks[0]] = pool.values[here.blocks[0]]
    there.tokens = 32
    spec = pool.layout.spec
    for layer, found in enumerate(append(there, computed(0), 32, TOKENS)):
        for kv in range(2):
            decoded = decode(
                here.contents()[layer, kv], spec.scheme.of(kv == 0), is_key=kv == 0, tokens=32, head_dim=32, dtype=torch.float32
            )
            assert torch.equal(found[kv][0, :, :32], decoded[:, 0])
            assert torch.equal(found[kv][..., 32:, :], computed(0)[layer, kv, ..., 32:, :])
            assert 0 < (found[kv] - computed(0)[layer, kv]).abs().max() < 0.5
