"""Promises of hints.py: sessions of a trace, and hints that name the true time of each block's next read."""

import pytest

from kvstore.lab.hints import HintedReplay, next_reads_s, sessions
from kvstore.lab.replay import CacheReplay
from kvstore.protocol.errors import InvalidArgument
from tests.lab.prompts import conversations, requests


def test_turns_of_one_conversation_are_a_session() -> None:
    assert sessions(requests([[1, 2], [1, 2, 3], [4], [1, 2, 3, 5], [4, 6]])) == [0, 0, 2, 0, 2]


def test_prompts_below_a_shared_prefix_are_sessions_of_their_own() -> None:
    talk = requests([[1, 10], [1, 20], [1, 30], [1, 40], [1, 50], [1, 40, 41], [1, 50]])
    assert sessions(talk)[3:] == [3, 4, 3, 4]


def test_next_reads_are_of_later_requests() -> None:
    found = list(next_reads_s(requests([[1, 2], [1], [3], [1, 3]], every_s=5)))[::-1]
    assert found == [{1: 5}, {1: 15}, {3: 15}, {}]


def ratio(capacity: int, accuracy: float, *, share: float = 0.5) -> float:
    found = conversations(1000)
    return HintedReplay("prefix", capacity, found, share=share, accuracy=accuracy).run(found).prefix_hit_ratio


def test_true_hints_raise_the_ratio_and_random_ones_cost_nothing() -> None:
    unhinted = CacheReplay("prefix", 1000).run(conversations(1000)).prefix_hit_ratio
    assert ratio(1000, 1.0) > 1.3 * unhinted
    assert ratio(1000, 0.0) > 0.98 * unhinted
    assert ratio(1000, 1.0, share=0) == unhinted


def test_policies_without_hints_ignore_them() -> None:
    found = conversations()
    hinted = HintedReplay("lru", 500, found, share=1, accuracy=1).run(found)
    assert hinted == CacheReplay("lru", 500).run(found)


@pytest.mark.parametrize(("share", "accuracy"), [(-0.1, 1), (0.5, 1.1)])
def test_shares_out_of_range_are_refused(share: float, accuracy: float) -> None:
    with pytest.raises(InvalidArgument, match="it must be from 0 to 1"):
        HintedReplay("prefix", 9, [], share=share, accuracy=accuracy)
