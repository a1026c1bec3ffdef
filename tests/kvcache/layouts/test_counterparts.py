"""Pairs of sending and receiving ranks: each element is sent once, and ranks with replicas share the load."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kvcache.layouts.counterparts import RankPair, find_pairs
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import InvalidArgument
from tests.kvcache.layouts.pools import layout_of, spec_of


def ranks(source: CacheLayout, destination: CacheLayout, *, source_dp: int = 0, destination_dp: int = 0) -> list[tuple[int, int]]:
    return [pair[:2] for pair in find_pairs(source, destination, source_dp=source_dp, destination_dp=destination_dp)]


def test_holders_of_one_head_share_the_receivers() -> None:
    latent = spec_of(mla=True)
    assert ranks(layout_of(latent, tp=2), layout_of(latent, tp=4)) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert ranks(layout_of(latent, tp=4), layout_of(latent, tp=2)) == [(0, 0), (1, 1)]
    assert ranks(layout_of(spec_of(kv_heads=2), tp=4), layout_of(spec_of(kv_heads=2))) == [(0, 0), (2, 0)]


@st.composite
def layouts(draw: st.DrawFn, *, kv_heads: int, layers: int) -> CacheLayout:
    shards = draw(st.sampled_from([size for size in range(1, 17) if kv_heads % size == 0 or size % kv_heads == 0]))
    dp, pp, cp = draw(st.integers(1, 2)), draw(st.integers(1, layers)), draw(st.integers(1, 3))
    spec = spec_of(layers=layers, kv_heads=kv_heads, block_tokens=draw(st.sampled_from([2, 4])))
    return layout_of(spec, tp=shards * dp, dp=dp, pp=pp, cp=cp)


@given(data=st.data(), kv_heads=st.sampled_from([1, 2, 4, 6]), layers=st.integers(1, 4))
@settings(max_examples=40)
def test_each_receiver_gets_each_element_once(data: st.DataObject, kv_heads: int, layers: int) -> None:
    source, destination = (data.draw(layouts(kv_heads=kv_heads, layers=layers)) for _ in range(2))
    groups = {"source_dp": source.parallel.dp - 1, "destination_dp": destination.parallel.dp - 1}
    pairs = find_pairs(source, destination, **groups)
    assert list(pairs) == sorted(pairs, key=lambda pair: (pair.destination_rank, pair.source_rank))
    assert len({pair[:2] for pair in pairs}) == len(pairs)
    for token in range(0, 48, 2):
        got = Counter(element for pair in pairs for element in exchanged(source, destination, pair, token))
        wanted = {
            (rank, layer, head)
            for rank in range(destination.parallel.ranks)
            if destination.parallel.group_of(rank) == groups["destination_dp"] and has(destination, rank, token)
            for layer in destination.rank_layers(rank)
            for head in destination.rank_heads(rank)
        }
        assert set(got) == wanted
        assert set(got.values()) == {1}


def has(layout: CacheLayout, rank: int, token: int) -> bool:
    return layout.parallel.coordinates(rank).cp == token // layout.spec.block_tokens % layout.parallel.cp


def exchanged(source: CacheLayout, destination: CacheLayout, pair: RankPair, token: int) -> list[tuple[int, int, int]]:
    assert set(pair.layers) <= set(source.rank_layers(pair.source_rank))
    assert set(pair.heads) <= set(source.rank_heads(pair.source_rank))
    if not has(source, pair.source_rank, token) or not has(destination, pair.destination_rank, token):
        return []
    return [(pair.destination_rank, layer, head) for layer in pair.layers for head in pair.heads]


def test_incompatible_block_sizes_are_rejected_without_a_scan() -> None:
    """A peer tells its layout: a turn of this one is sixteen million units."""
    ours, theirs = layout_of(spec_of(block_tokens=16)), layout_of(spec_of(block_tokens=(1 << 20) - 1))
    with pytest.raises(InvalidArgument, match="1048575"):
        find_pairs(ours, theirs, source_dp=0, destination_dp=0)
