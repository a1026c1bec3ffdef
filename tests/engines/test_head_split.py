"""Values by KV heads: each head is in exactly one value at every tensor-parallel size."""

from dataclasses import replace

import pytest

from kvstore.engines.head_split import HeadSplit, head_split
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError

BASE = Namespace(model="m", dtype="float32", block_tokens=16)


@pytest.mark.parametrize(
    ("share_tp", "kv_heads", "tp"),
    [(n, h, tp) for h in (1, 2, 6, 8) for n in range(1, h + 1) if not h % n for tp in (1, 2, 3, 4, 6, 8) if not n % tp],
)
def test_head_split_gives_each_value_to_one_rank(share_tp: int, kv_heads: int, tp: int) -> None:
    splits = [head_split(share_tp, kv_heads=kv_heads, tp=(rank, tp)) for rank in range(tp)]
    values = [value for split in splits for value in range(split.first, split.first + split.count)]
    assert values == list(range(share_tp))
    assert all(split.is_writer and split.total == share_tp for split in splits)


def test_head_split_of_replicas_has_one_writer_for_each_head() -> None:
    splits = [head_split(2, kv_heads=2, tp=(rank, 8)) for rank in range(8)]
    assert [split.first for split in splits] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [rank for rank, split in enumerate(splits) if split.is_writer] == [0, 4]


@pytest.mark.parametrize(
    ("share_tp", "kv_heads", "tp", "possible"),
    [
        (3, 8, 1, "takes 1, 2, 4, 8, 0 (off)"),
        (2, 8, 4, "takes 4, 8, 0 (off)"),
        (16, 8, 4, "takes 4, 8, 0 (off)"),
        (1, 2, 8, "takes 2, 0 (off)"),
        (2, 2, 3, "takes 0 (off)"),
        (0, 2, 1, "takes 1, 2, 0 (off)"),
    ],
)
def test_head_split_names_the_numbers_that_are_possible(share_tp: int, kv_heads: int, tp: int, possible: str) -> None:
    with pytest.raises(ConfigError, match=f"share_tp is {share_tp}: .* {kv_heads} KV heads on {tp} .*") as caught:
        head_split(share_tp, kv_heads=kv_heads, tp=(0, tp))
    assert possible in str(caught.value)


def test_namespaces_name_the_value_and_all_values() -> None:
    assert [each.heads for each in HeadSplit(8, 4, 2).namespaces(BASE)] == [(4, 8), (5, 8)]
    whole = [name for tp in (1, 2, 4) for rank in range(tp) for name in head_split(4, kv_heads=8, tp=(rank, tp)).namespaces(BASE)]
    assert len({name.id for name in whole}) == 4


def test_single_value_namespaces_equal_those_of_one_rank() -> None:
    (only,) = HeadSplit(1, 0, 1).namespaces(replace(BASE, heads=(0, 2)))
    assert only == BASE == HeadSplit(1, 0, 1).label(BASE)


def test_label_is_equal_on_all_ranks_and_unlike_values() -> None:
    labels = {head_split(4, kv_heads=4, tp=(rank, tp)).label(BASE).id for tp in (1, 2, 4) for rank in range(tp)}
    assert len(labels) == 1
    assert labels.isdisjoint(name.id for name in HeadSplit(4, 0, 4).namespaces(BASE))
    assert BASE.id not in labels
