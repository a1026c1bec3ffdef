"""Promises of parts.py: parts cover what a pair moves exactly once, keep to their size, and are the same at both ends."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handover.movements.parts import MAX_UNITS, Chunk, PartId, PartPlan, plan_parts, unit_tokens
from kvstore.protocol.errors import InvalidArgument
from tests.handover.scene import SPEC, layout_of


def plan(layers: range, tokens: Chunk, *, part_bytes: int, token_bytes: int = 10) -> PartPlan:
    return plan_parts(layers, tokens, 16, measure=lambda chunk: (chunk.end - chunk.start) * token_bytes, part_bytes=part_bytes)


def all_parts(plan: PartPlan) -> list[PartId]:
    step = plan.layers_per_part
    starts = range(plan.layers.start, plan.layers.stop, step)
    return [PartId(at, min(at + step, plan.layers.stop), chunk) for at in starts for chunk in range(len(plan.chunks))]


@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 300), st.integers(1, 5000))
def test_gathered_parts_cover_layers_and_tokens_once(layers: int, first: int, count: int, part_bytes: int) -> None:
    tokens = Chunk(first * 16, first * 16 + count)
    found = plan(range(3, 3 + layers), tokens, part_bytes=part_bytes)
    assert [chunk.start for chunk in found.chunks] == [tokens.start, *(chunk.end for chunk in found.chunks[:-1])]
    assert found.chunks[-1].end == tokens.end
    assert all(chunk.start % 16 == 0 for chunk in found.chunks)
    units = [unit for part in all_parts(found) for unit in part.units]
    assert len(units) == len(set(units)) == found.unit_count
    for part in all_parts(found):
        assert found.has(part)
        chunk = found.chunks[part.chunk]
        assert len(part.layers) * (chunk.end - chunk.start) * 10 <= found.slot_bytes <= max(part_bytes, 16 * 10)


def test_more_parts_than_a_sender_should_go_through_are_refused() -> None:
    most = Chunk(0, MAX_UNITS // 4 * 16)
    assert plan(range(4), most, part_bytes=1).unit_count == MAX_UNITS
    assert plan(range(4), Chunk(0, most.end + 1), part_bytes=0).unit_count == 4
    with pytest.raises(InvalidArgument, match="staging_part_bytes is too small"):
        plan(range(4), Chunk(0, most.end + 1), part_bytes=1)


def test_last_chunk_on_other_ranks_is_left_out() -> None:
    found = plan_parts(range(1), Chunk(0, 40), 32, measure=lambda chunk: 100 * (chunk.start < 32), part_bytes=100)
    assert found.chunks == (Chunk(0, 32),)


def test_units_are_whole_blocks_of_all_cp_ranks() -> None:
    large = dataclasses.replace(SPEC, block_tokens=64)
    assert unit_tokens(layout_of(cp=3), layout_of(large)) == 192
    assert unit_tokens(layout_of(), layout_of()) == 16
