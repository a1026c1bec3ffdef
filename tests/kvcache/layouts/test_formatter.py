"""A cache that goes from any layout to any other is the same cache, to the bit.

A re-mapping rejects impossible arguments and gives the reason.
"""

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.layouts.formatter import Remapping, check_blocks, check_layouts, check_tokens, remap
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.orders import ORDERS
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.protocol.errors import InvalidArgument
from tests.kvcache.layouts.pools import Pools, assert_equal, blocks_for, cells_of, layout_of, noisy_pools, random_cache, scatter, spec_of

QUANTISED = CacheScheme.parse("k=int8,v=int4/16")


def move(
    source: CacheLayout,
    destination: CacheLayout,
    tokens: int,
    *,
    first_token: int = 0,
    source_dp: int = 0,
    destination_dp: int = 0,
    seed: int = 1,
    layers: list[range | None] | None = None,
    staged: bool = False,
) -> None:
    """Scatters a random cache by one layout, moves it by the plan, and compares with the same cache scattered by the other."""
    cache = random_cache(source, tokens, seed=seed)
    ours, theirs = blocks_for(source, tokens, seed=seed), blocks_for(destination, tokens, seed=2 * seed)
    sources = scatter(cells_of(source, ours, tokens, dp=source_dp), cache, noisy_pools(source, seed=seed + 1))
    before = noisy_pools(destination, seed=seed + 2)
    expected = scatter(cells_of(destination, theirs, tokens, dp=destination_dp, first_token=first_token), cache, before)
    remapping = remap(source, destination, source_dp=source_dp, destination_dp=destination_dp)
    for part in layers or [None]:
        for pair in remapping.pairs:
            sizes: dict[str, Any] = {"tokens": tokens, "first_token": first_token, "layers": part}
            if staged:
                _stage(remapping, pair.source_rank, pair.destination_rank, sources, before, ours, theirs, sizes)
            else:
                copies = remapping.copies(pair.source_rank, pair.destination_rank, ours, theirs, **sizes)
                for region, offset, to_region, to_offset, length in zip(*(column.tolist() for column in copies), strict=True):
                    data = sources[pair.source_rank][region][offset : offset + length]
                    before[pair.destination_rank][to_region][to_offset : to_offset + length] = data
                assert copies.length.sum() == remapping.staged_bytes(pair.source_rank, pair.destination_rank, **sizes)
    assert_equal(before, expected)


def _stage(
    remapping: Remapping,
    source_rank: int,
    destination_rank: int,
    sources: Pools,
    destinations: Pools,
    ours: tuple[int, ...],
    theirs: tuple[int, ...],
    sizes: dict[str, Any],
) -> None:
    staged = remapping.gather(source_rank, destination_rank, sources[source_rank], ours, **sizes)
    assert len(staged) == remapping.staged_bytes(source_rank, destination_rank, **sizes)
    remapping.scatter(source_rank, destination_rank, destinations[destination_rank], theirs, staged, **sizes)


TPS, PPS = (1, 2, 4, 8, 16), (1, 2, 4, 8)
ORDER_PAIRS = (("HND", "NHD"), ("NHD", "HND"), ("HND", "HND"), ("NHD", "NHD"))


@pytest.mark.parametrize(("tp", "pp"), list(itertools.product(TPS, PPS)))
def test_any_tp_and_pp_becomes_any_other(tp: int, pp: int) -> None:
    """Heads are held up to four times on either side, and every other layout has uneven stages.

    A hundred of the 400 pairs: any three of the two sides' TP and PP, and any two of these, the orders, the stages and the staging, take
    all their values together.
    """
    spec = spec_of(layers=8, kv_heads=4)
    split = {2: (5, 3), 4: (1, 4, 1, 2)}
    for at, other_tp in enumerate(TPS):
        turn = at + TPS.index(tp) + PPS.index(pp)
        other_pp = PPS[turn % 4]
        ours, theirs = ORDER_PAIRS[(at + PPS.index(pp)) % 4]
        source = CacheLayout(spec=spec, parallel=Parallel(tp=tp, pp=pp), pool_blocks=2, order=ours)
        uneven = split.get(other_pp, ()) if turn % 8 < 4 else ()
        destination = CacheLayout(spec=spec, parallel=Parallel(tp=other_tp, pp=other_pp, layer_split=uneven), pool_blocks=2, order=theirs)
        move(source, destination, 2, staged=turn % 3 == 0)


def test_tensor_parallel_sizes_need_not_divide_one_another() -> None:
    spec = spec_of(kv_heads=12)
    for tp, other in itertools.product((1, 2, 3, 4, 6, 12, 24), repeat=2):
        move(layout_of(spec, tp=tp), layout_of(spec, tp=other, order="NHD"), 3)


@pytest.mark.parametrize("staged", [False, True])
def test_records_are_moved_whole(staged: bool) -> None:
    spec = CacheSpec(layers=3, kv_heads=4, head_dim=16, block_tokens=4, scheme=QUANTISED)
    source, destination = layout_of(spec, tp=2, cp=2), layout_of(spec, tp=4, pp=2, order="vllm-flash-hnd")
    move(source, destination, 10, staged=staged)
    move(source, destination, 10, first_token=4, staged=staged)


@pytest.mark.parametrize("staged", [False, True])
def test_a_layer_at_a_time_is_all_of_them(staged: bool) -> None:
    spec = spec_of(layers=5)
    parts: list[range | None] = [range(layer, layer + 1) for layer in range(5)]
    move(layout_of(spec, pp=2), layout_of(spec, pp=3, order="vllm-flash"), 7, layers=parts, staged=staged)
    move(layout_of(spec, pp=2), layout_of(spec, pp=3), 7, layers=[range(2), range(2, 99)], staged=staged)


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[CacheLayout, CacheLayout]:
    kv_heads, layers, mla = draw(st.sampled_from([1, 2, 4, 6])), draw(st.integers(1, 5)), draw(st.booleans())
    scheme = draw(st.sampled_from([NONE, NONE, CacheScheme.parse("k=int8,v=fp8-head")]))
    block_tokens = draw(st.sampled_from([2, 4]))
    orders = [order for order in ORDERS.values() if scheme == NONE or order.endswith("token")]
    heads = 1 if mla else kv_heads

    def layout() -> CacheLayout:
        ratio = draw(st.integers(1, 3)) if scheme == NONE else 1
        shards = draw(st.sampled_from([size for size in range(1, 9) if heads % size == 0 or size % heads == 0]))
        dp, pp, cp = draw(st.integers(1, 2)), draw(st.integers(1, min(3, layers))), draw(st.integers(1, 3))
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1))) if pp > 1 else []
        split = tuple(np.diff([0, *cuts, layers]).tolist()) if draw(st.booleans()) else ()
        return CacheLayout(
            spec=spec_of(layers=layers, kv_heads=heads, mla=mla, scheme=scheme, block_tokens=block_tokens * ratio),
            parallel=Parallel(tp=shards * dp, pp=pp, cp=cp, dp=dp, layer_split=split),
            pool_blocks=10,
            order=draw(st.sampled_from(orders)),
        )

    return layout(), layout()


@given(both=two_layouts(), tokens=st.integers(1, 18), data=st.data())
@settings(max_examples=60)
def test_any_layout_becomes_any_other_or_is_refused(both: tuple[CacheLayout, CacheLayout], tokens: int, data: st.DataObject) -> None:
    source, destination = both
    small, large = sorted((source.spec.block_tokens, destination.spec.block_tokens))
    if large % small:
        with pytest.raises(InvalidArgument, match="one must be a multiple of the other"):
            remap(source, destination)
        return
    transposed = [layout.axes.transposed for layout in both]
    if transposed[0] != transposed[1] or (transposed[0] and large != small):
        with pytest.raises(InvalidArgument, match=r"both sides must transpose|records transposed are whole blocks"):
            remap(source, destination)
        return
    first_token = data.draw(st.integers(0, tokens))
    move(
        source,
        destination,
        tokens,
        first_token=first_token // source.spec.block_tokens * source.spec.block_tokens if source.has_records else first_token,
        source_dp=source.parallel.dp - 1,
        destination_dp=destination.parallel.dp - 1,
        seed=data.draw(st.integers(0, 3)),
        staged=data.draw(st.booleans()),
    )


def test_a_remapping_tells_who_speaks_with_whom_and_is_kept() -> None:
    source, destination = layout_of(spec_of(block_tokens=2), tp=2), layout_of(spec_of(block_tokens=6), tp=8)
    remapping = remap(source, destination)
    assert remapping is remap(replace(source), replace(destination))
    assert remapping.receivers_of(0) == (0, 1, 2, 3)
    assert remapping.senders_of(7) == (1,)
    assert remap(destination, source).senders_of(0) == (0, 2)
    assert remap(destination, source).receivers_of(1) == ()


def test_the_shortest_run_tells_whether_to_stage() -> None:
    spec = CacheSpec.named("llama3-70b")
    for order, run_bytes in (("HND", 16 * 256), ("NHD", 256)):
        source, destination = (CacheLayout(spec=spec, parallel=Parallel(tp=tp), pool_blocks=9, order=order) for tp in (8, 4))
        assert remap(source, destination).run_bytes(0, 0) == run_bytes
        assert remap(source, source).run_bytes(7, 7) == spec.block_bytes // 8


LAYOUT = layout_of(spec_of(layers=4), tp=4)


@pytest.mark.parametrize(
    ("ranks", "arguments", "reason"),
    [
        ((0, 1), {}, "rank 0 sends nothing to rank 1: it sends to (0,)"),
        ((4, 0), {}, "rank 4 is outside [0, 4)"),
        ((0, -1), {}, "rank -1 is outside [0, 4)"),
        ((0, 0), {"tokens": -1}, "tokens [0, -1) are not a range"),
        ((0, 0), {"tokens": 9}, "4 blocks of 2 tokens are too few for 9 tokens"),
        ((0, 0), {"layers": range(3, 1, -1)}, "layers is range(3, 1, -1): it must be a range of step 1"),
    ],
)
def test_what_no_pair_can_do_is_refused(ranks: tuple[int, int], arguments: dict[str, Any], reason: str) -> None:
    remapping, blocks = remap(LAYOUT, LAYOUT), [0, 1, 2, 3]
    pool = noisy_pools(LAYOUT, seed=0)[0]
    for call in (
        lambda: remapping.copies(*ranks, blocks, blocks, **arguments),
        lambda: remapping.gather(*ranks, pool, blocks, **{"tokens": 8} | arguments),
        lambda: remapping.scatter(*ranks, pool, blocks, b"", **{"tokens": 8} | arguments),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(reason)):
            call()


def test_groups_that_do_not_exist_are_refused() -> None:
    for groups in ({"source_dp": 1}, {"destination_dp": -1}):
        with pytest.raises(InvalidArgument, match="there are 1 attention-DP groups"):
            remap(LAYOUT, LAYOUT, **groups)


def test_a_buffer_to_gather_into_is_used_and_must_fit() -> None:
    remapping, pool = remap(LAYOUT, LAYOUT), noisy_pools(LAYOUT, seed=0)[0]
    size_bytes = remapping.staged_bytes(0, 0, tokens=3)
    out = bytearray(size_bytes)
    assert (
        remapping.gather(0, 0, pool, [0, 1], tokens=3, out=out).tobytes()
        == bytes(out)
        == remapping.gather(0, 0, pool, [0, 1], tokens=3).tobytes()
    )
    with pytest.raises(InvalidArgument, match=f"a buffer of 5 bytes for {size_bytes}: both ends must use the same tokens and layers"):
        remapping.gather(0, 0, pool, [0, 1], tokens=3, out=bytearray(5))
    with pytest.raises(InvalidArgument, match="read-only"):
        remapping.gather(0, 0, pool, [0, 1], tokens=3, out=bytes(size_bytes))
    with pytest.raises(InvalidArgument, match="a buffer of 5 bytes"):
        remapping.scatter(0, 0, pool, [0, 1], bytes(5), tokens=3)


def test_layers_that_a_pair_does_not_have_are_nothing() -> None:
    source = layout_of(spec_of(layers=4), pp=2)
    remapping, pool = remap(source, source), noisy_pools(source, seed=0)[0]
    assert remapping.copies(0, 0, [0], [0], layers=range(2, 4)).length.sum() == 0
    assert remapping.gather(0, 0, pool, [0], tokens=2, layers=range(2, 4)).size == 0
    remapping.scatter(0, 0, pool, [0], b"", tokens=2, layers=range(2, 4))


SPEC = CacheSpec(layers=4, kv_heads=1, heads=4, head_dim=16, block_tokens=16, model="one")
INT8 = CacheScheme.parse("int8")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"layers": 5}, "layers 4 and 5"),
        ({"kv_heads": 2}, "kv_heads 1 and 2"),
        ({"head_dim": 32}, "head_dim 16 and 32"),
        ({"dtype": "float16"}, "dtype bfloat16 and float16"),
        ({"attention": Attention.MLA}, "kv_factor 2 and 1"),
        ({"scheme": INT8}, "scheme none and int8"),
        ({"window_tokens": 32, "windowed_layers": 2}, "window_tokens 0 and 32; windowed_layers 0 and 2"),
        ({"model": "two"}, "model 'one' and 'two'"),
        ({"layers": 5, "model": "two"}, "layers 4 and 5; model 'one' and 'two'"),
        ({"block_tokens": 24}, "blocks of 16 tokens cannot become blocks of 24: one must be a multiple of the other"),
    ],
)
def test_layouts_of_different_caches_are_refused(changed: dict[str, Any], reason: str) -> None:
    other = replace(SPEC, **{"attention": None} | changed)
    with pytest.raises(InvalidArgument, match=re.escape(reason)):
        check_layouts(layout_of(SPEC), layout_of(other))


@pytest.mark.parametrize("changed", [{"heads": 8}, {"model": ""}, {"block_tokens": 48}, {"block_tokens": 4}])
def test_layouts_may_differ_in_what_is_not_cached_and_in_the_cut(changed: dict[str, Any]) -> None:
    other = replace(SPEC, **{"attention": None} | changed)
    check_layouts(layout_of(SPEC), layout_of(other, order="NHD", tp=2))
    check_layouts(layout_of(other), layout_of(SPEC))


def test_records_are_not_cut() -> None:
    ours, theirs = (layout_of(replace(SPEC, scheme=INT8, block_tokens=tokens)) for tokens in (16, 32))
    check_layouts(ours, ours)
    with pytest.raises(InvalidArgument, match="records of the scheme int8 are whole blocks: blocks of 16 tokens cannot become "):
        check_layouts(ours, theirs)


def test_what_is_transposed_is_neither_turned_nor_cut() -> None:
    ours = layout_of(SPEC, order="vllm-cpu")
    check_layouts(ours, layout_of(SPEC, order="kv layer | head block token K^T"))
    with pytest.raises(InvalidArgument, match=re.escape("layer | block head kv token K^T and block layer kv head token: both sides")):
        check_layouts(ours, layout_of(SPEC))
    with pytest.raises(InvalidArgument, match="records transposed are whole blocks: blocks of 16 tokens cannot become ones of 32"):
        check_layouts(ours, layout_of(replace(SPEC, block_tokens=32), order="vllm-cpu"))


@pytest.mark.parametrize(("first_token", "tokens"), [(-1, 4), (5, 4), (0, -1)])
def test_tokens_that_are_no_range_are_refused(first_token: int, tokens: int) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"tokens [{first_token}, {tokens}) are not a range")):
        check_tokens(layout_of(SPEC), first_token=first_token, tokens=tokens)


def test_quantised_tokens_are_whole_blocks() -> None:
    raw, quantised = layout_of(SPEC), layout_of(replace(SPEC, scheme=INT8))
    assert check_tokens(raw, first_token=3, tokens=20) == (3, 20)
    assert check_tokens(quantised, first_token=16, tokens=20) == (16, 32)
    with pytest.raises(InvalidArgument, match="first_token is 3: with records of whole blocks it must be a multiple of block_tokens, 16"):
        check_tokens(quantised, first_token=3, tokens=20)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([1], "1 blocks of 2 tokens are too few for 4 tokens: 2 are needed"),
        ([1, 8], "blocks 1 to 8 are not all in a pool of 8 blocks"),
        ([-1, 2], "blocks -1 to 2 are not all in a pool of 8 blocks"),
        ([2, 2], "a block is written to twice"),
        ([1.0, 2.0], "list of whole numbers, not an array of float64"),
        ([[1, 2]], "with 2 axes"),
        (5, "with 0 axes"),
    ],
)
def test_lists_of_blocks_that_cannot_be_are_refused(blocks: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(reason)):
        check_blocks(layout_of(spec_of()), 0, blocks, first_token=0, end_token=3 if blocks == [2, 2] else 4, is_written=True)


def test_only_blocks_that_are_used_are_looked_at() -> None:
    layout = layout_of(spec_of(), cp=2)
    check_blocks(layout, 0, [5, 5, 6, 6], first_token=0, end_token=8, is_written=True)
    check_blocks(layout, 0, [-1, -1, 6, 99], first_token=4, end_token=6, is_written=True)
    check_blocks(layout, 1, [-1, -1, 99, 6], first_token=4, end_token=8, is_written=True)
    check_blocks(layout, 1, [-1, 2, -1, 6], first_token=2, end_token=8, is_written=True)
    check_blocks(layout, 0, [5, 5, 5, 5], first_token=0, end_token=8, is_written=False)
    check_blocks(layout, 0, [], first_token=0, end_token=0, is_written=True)
    with pytest.raises(InvalidArgument, match="written to twice"):
        check_blocks(layout, 0, [5, 1, 5, 2], first_token=0, end_token=8, is_written=True)
    with pytest.raises(InvalidArgument, match="blocks -1 to 6"):
        check_blocks(layout, 1, [0, -1, 0, 6], first_token=2, end_token=8, is_written=True)
