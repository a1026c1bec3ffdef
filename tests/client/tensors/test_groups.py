"""Promises of groups.py: from where a hybrid model can go on."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.tensors.groups import AnyGroup, CacheGroup, GroupBlockTable, StateGroup, longest
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import InvalidArgument


def full(name: str = "full", *, block_tokens: int = 4, window_tokens: int = 0) -> CacheGroup:
    return CacheGroup(name=name, spec=CacheSpec(layers=1, kv_heads=1, head_dim=2, block_tokens=block_tokens), window_tokens=window_tokens)


def state(block_tokens: int = 4) -> StateGroup:
    return StateGroup(name="state", form="f", state_bytes=8, block_tokens=block_tokens)


def there(*blocks: int) -> Any:
    return np.array(blocks, np.bool_)


@pytest.mark.parametrize(("tokens", "first"), [(4, 0), (8, 0), (12, 0), (13, 0), (14, 1), (16, 1), (40, 7)])
def test_a_window_needs_the_blocks_that_its_tokens_are_in(tokens: int, first: int) -> None:
    assert full(window_tokens=10).first_needed(tokens) == first
    assert full().first_needed(tokens) == 0


@pytest.mark.parametrize(
    ("groups", "present", "tokens"),
    [
        ([full()], [there(1, 1, 0, 1)], 8),
        ([full()], [there(0, 1)], 0),
        ([full()], [there()], 0),
        ([full(window_tokens=4)], [there(0, 0, 0, 1)], 16),
        ([full(window_tokens=5)], [there(0, 1, 1, 0, 1)], 12),
        ([full(), full("w", window_tokens=4)], [there(1, 1, 1, 1), there(0, 1, 1, 0)], 12),
        ([full(), state()], [there(1, 1, 1, 1), there(0, 1, 0, 0)], 8),
        ([full(), state(8)], [there(1, 1, 1, 1), there(0, 1)], 16),
        ([full(), full("b", block_tokens=8)], [there(1, 1, 1), there(1)], 8),
        ([full(), full("b", block_tokens=8)], [there(1), there(1)], 0),
    ],
)
def test_longest_prefix_is_resumable_by_every_group(groups: list[AnyGroup], present: Any, tokens: int) -> None:
    assert longest(groups, present, limit_tokens=1000) == tokens


@pytest.mark.promise("value-layouts")
@given(st.data())
def test_it_is_what_trying_every_position_finds(data: st.DataObject) -> None:
    groups: list[AnyGroup] = []
    present = []
    for number in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.sampled_from([1, 2, 4]))
        window = data.draw(st.integers(0, 9))
        of_states = data.draw(st.booleans())
        groups.append(state(size) if of_states else full(str(number), block_tokens=size, window_tokens=window))
        present.append(data.draw(st.lists(st.booleans(), max_size=8)))
    limit = data.draw(st.integers(0, 20))

    def can_go_on(group: AnyGroup, of_group: list[bool], tokens: int) -> bool:
        if tokens % group.block_tokens or tokens // group.block_tokens > len(of_group):
            return False
        if isinstance(group, StateGroup):
            return of_group[tokens // group.block_tokens - 1]
        needed = range(max(0, tokens - group.window_tokens) if group.window_tokens else 0, tokens)
        return all(of_group[token // group.block_tokens] for token in needed)

    expected = max(
        (
            tokens
            for tokens in range(1, limit + 1)
            if all(can_go_on(group, of_group, tokens) for group, of_group in zip(groups, present, strict=True))
        ),
        default=0,
    )
    assert longest(groups, [there(*of_group) for of_group in present], limit_tokens=limit) == expected


def test_a_table_has_the_places_of_its_blocks_and_no_others() -> None:
    table = GroupBlockTable(None, [7, 8, 9], first_block=2)
    assert list(table.part(2, 5)) == [7, 8, 9]
    assert list(table.part(3, 4)) == [8]
    assert list(table.part(5, 5)) == []
    for start, stop in ((1, 3), (4, 6), (6, 6)):
        with pytest.raises(InvalidArgument, match=f"blocks {start} to {stop} of the sequence are needed, but the table has blocks 2 to 5"):
            table.part(start, stop)
