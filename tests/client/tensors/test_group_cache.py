"""Promises of group_cache.py, on a real cluster: layers that keep different things go on from the same token."""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvstore.client import Client
from kvstore.client.tensors.group_cache import MAX_READS, GroupCache
from kvstore.client.tensors.groups import CacheGroup, GroupBlockTable, StateGroup
from kvstore.client.tensors.pools import EnginePool
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ProtocolError

FULL = CacheGroup(name="full", spec=CacheSpec(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_tokens=4))
WINDOW = CacheGroup(name="window", spec=CacheSpec(layers=3, kv_heads=1, head_dim=4, dtype="float16", block_tokens=4), window_tokens=6)
STATE = StateGroup(name="mamba", form="conv [4, 3] float32, ssm [4, 4] float32", state_bytes=112, block_tokens=8)
TOKENS = list(range(34))
_serial = itertools.count()


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(model=f"groups {next(_serial)}", dtype="float32", block_tokens=4, extra={"engine": "e"})


def blocks_of(group: CacheGroup, count: int, *, seed: int = 0) -> Any:
    spec = group.spec
    shape = (count, spec.layers, spec.kv_factor, spec.kv_heads, spec.block_tokens, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, spec.dtype))


def state_of(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, generator=generator), torch.randn(4, 4, generator=generator)]


def keys_of(namespace: Namespace, client: Client, cache: GroupCache, group: Any, tokens: Sequence[int]) -> list[bytes]:
    """By the cache's own word, which the tests of keys hold to it."""
    operations: Any = cache
    return [key for of_block in operations._keys(group, _named(tokens)) for key in of_block]


def _named(tokens: Sequence[int]) -> Any:
    from kvstore.client.tensors.group_cache import _Sequence

    return _Sequence(tokens, None)


@pytest.mark.promise("value-layouts")
def test_all_groups_resume_from_the_same_token(client: Client, namespace: Namespace) -> None:
    cache = GroupCache(client, [FULL, WINDOW, STATE], namespace)
    full, window = blocks_of(FULL, 8), blocks_of(WINDOW, 3)
    assert cache.match(TOKENS) == 0
    assert (
        cache.put(TOKENS, {"full": GroupBlockTable(full, range(8)), "window": GroupBlockTable(window, [2, 0, 1], first_block=5)})
        == 8 * 2 + 3
    )
    assert cache.match(TOKENS) == 0, "without a state"
    uncommitted, late = state_of(1), state_of(2)
    assert cache.put(TOKENS, {}, states={"mamba": uncommitted}, state_tokens=8) == 1
    assert cache.match(TOKENS) == 0, "whose window is not there"
    assert cache.put(TOKENS, {}, states={"mamba": late}, state_tokens=32) == 1
    assert cache.match(TOKENS) == 32
    out_full, out_window, out_state = torch.zeros_like(full), torch.zeros(6, 3, 2, 1, 4, 4).half(), [torch.zeros(4, 3), torch.zeros(4, 4)]
    tables = {"full": GroupBlockTable(out_full, range(8)), "window": GroupBlockTable(out_window, [-1, -1, -1, -1, -1, -1, 4, 1])}
    assert cache.get(TOKENS, tables, states={"mamba": out_state}) == 32
    assert out_full.equal(full)
    assert out_window[[4, 1]].equal(window[[0, 1]]), "blocks 6 and 7 of the sequence: the last six tokens"
    assert not out_window[[0, 2, 3, 5]].any()
    assert all(one.equal(other) for one, other in zip(out_state, late, strict=True))


@pytest.mark.promise("value-layouts")
def test_eviction_before_the_read_shortens_the_prefix(address: str, namespace: Namespace) -> None:
    class Losing(Client):
        lost: bytes | None = None

        def exists_batch(self, keys: Sequence[bytes], **options: Any) -> list[bool]:
            found = super().exists_batch(keys, **options)
            if self.lost is not None:
                self.remove([self.lost])
            return found

    with contextlib.closing(Losing(address)) as client:
        cache = GroupCache(client, [FULL, STATE], namespace)
        full = blocks_of(FULL, 8)
        for tokens in (8, 16, 32):
            cache.put(TOKENS, {"full": GroupBlockTable(full, range(8))}, states={"mamba": state_of(tokens)}, state_tokens=tokens)
        out, state = torch.zeros_like(full), [torch.zeros(4, 3), torch.zeros(4, 4)]

        client.lost = keys_of(namespace, client, cache, FULL, TOKENS)[2 * 4]
        assert cache.get(TOKENS, {"full": GroupBlockTable(out, range(8))}, states={"mamba": state}) == 16
        assert out[:4].equal(full[:4])
        assert all(one.equal(other) for one, other in zip(state, state_of(16), strict=True))

        client.lost = keys_of(namespace, client, cache, STATE, TOKENS)[1]
        assert cache.get(TOKENS, {"full": GroupBlockTable(out, range(8))}, states={"mamba": state}) == 8
        assert all(one.equal(other) for one, other in zip(state, state_of(8), strict=True))

        client.lost = keys_of(namespace, client, cache, STATE, TOKENS)[0]
        assert cache.get(TOKENS, {"full": GroupBlockTable(out, range(8))}, states={"mamba": state}) == 0


@pytest.mark.parametrize("window_tokens", [0, 8])
def test_unreadable_blocks_are_read_a_bounded_number_of_times(namespace: Namespace, window_tokens: int) -> None:
    """As those of an NVMe that is out of order."""
    calls: list[str] = []

    class Listed:
        def exists_batch(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[bool]:
            calls.append("exists")
            return [True] * len(keys)

        def get_batch_into(self, keys: Sequence[bytes], _buffers: Any, **_options: Any) -> list[int | None]:
            calls.append("get")
            return [None] * len(keys)

    group = dataclasses.replace(FULL, window_tokens=window_tokens)
    cache = GroupCache(Listed(), [group], namespace)  # type: ignore[arg-type]
    pool = blocks_of(group, 64)
    assert cache.get(range(1, 257), {"full": GroupBlockTable(pool, range(64))}) == 0
    assert calls == ["exists"] + ["get"] * (MAX_READS if window_tokens else 1)


def test_latents_and_indexer_have_separate_tables(client: Client, namespace: Namespace) -> None:
    latent = CacheSpec(layers=2, kv_heads=1, head_dim=18, heads=4, attention=Attention.MLA, dtype="bfloat16", block_tokens=8)
    keys = CacheSpec(layers=2, kv_heads=1, head_dim=12, heads=4, attention=Attention.MLA, dtype="float8_e4m3fn", block_tokens=4)
    cache = GroupCache(client, [CacheGroup(name="latent", spec=latent), CacheGroup(name="indexer", spec=keys)], namespace)
    pools, memory = {}, {}
    for name, spec in (("latent", latent), ("indexer", keys)):
        layout = CacheLayout(spec=spec, pool_blocks=9, order="vllm-mla")
        memory[name] = [torch.randint(0, 100, (layout.region_bytes(0, layer),), dtype=torch.uint8) for layer in range(2)]
        pools[name] = EnginePool(layout, memory[name])
    hashless = TOKENS[:24]
    put = {"latent": GroupBlockTable(pools["latent"], [8, 0, 1]), "indexer": GroupBlockTable(pools["indexer"], [0, 1, 2, 3, 4, 5])}
    assert cache.put(hashless, put, extras={0: b"lora"}) == 3 + 6
    before = {name: [layer.view(9, -1).clone() for layer in layers] for name, layers in memory.items()}
    get = {"latent": GroupBlockTable(pools["latent"], [2, 3, 4]), "indexer": GroupBlockTable(pools["indexer"], [6, 7, 8, 0, 1, 2])}
    assert (cache.match(hashless), cache.get(hashless, get)) == (0, 0)
    assert (cache.match(hashless, extras={0: b"lora"}), cache.get(hashless, get, extras={0: b"lora"})) == (24, 24)
    for name, sources, places in (("latent", [8, 0, 1], [2, 3, 4]), ("indexer", [0, 1, 2, 3, 4, 5], [6, 7, 8, 0, 1, 2])):
        for layer in range(2):
            assert memory[name][layer].view(9, -1)[places].equal(before[name][layer][sources])


def test_a_state_of_another_size_is_never_taken_for_one(client: Client, namespace: Namespace) -> None:
    cache = GroupCache(client, [STATE], namespace)
    [key, *_] = keys_of(namespace, client, cache, STATE, TOKENS)
    client.put(key, b"x" * 100)
    with pytest.raises(ProtocolError, match="the stored state of group mamba has 100 bytes instead of 112"):
        cache.get(TOKENS, {}, states={"mamba": state_of(0)})
