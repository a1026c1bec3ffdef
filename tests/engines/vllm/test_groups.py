"""What a prefix needs of each kind of cache."""

import numpy as np
import pytest

from kvstore.engines.vllm.groups import LayerGroup, fail_whole

FULL, WINDOW, STATE = LayerGroup(4), LayerGroup(4, window_tokens=5), LayerGroup(4, 1, is_state=True)


@pytest.mark.parametrize(("group", "first"), [(FULL, [0, 0, 0, 0]), (WINDOW, [0, 0, 0, 1]), (STATE, [0, 0, 1, 2])])
def test_the_blocks_before_a_window_are_not_needed(group: LayerGroup, first: list[int]) -> None:
    assert [group.first_needed(tokens) for tokens in (0, 4, 8, 12)] == first


@pytest.mark.parametrize(
    ("group", "ends"), [(FULL, [True, False, False, False]), (WINDOW, [True, False, False, True]), (STATE, [True, False, True, True])]
)
def test_a_position_can_be_gone_on_from_with_what_is_needed_there(group: LayerGroup, ends: list[bool]) -> None:
    assert group.can_go_on(np.array([True, False, True, True])).tolist() == ends


def test_only_attention_to_all_tokens_of_one_block_table_goes_on_from_what_came() -> None:
    assert not fail_whole([FULL])
    assert fail_whole([FULL, FULL])
    assert fail_whole([WINDOW])
