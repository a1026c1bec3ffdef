"""Promises of arrays.py: chosen blocks of torch tensors and of numpy arrays, in a row or scattered."""

from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.tensors.arrays import SINGLE_BLOCK_BYTES, as_index, gather, is_tensor, scatter


def test_a_run_of_blocks_is_a_slice_and_others_are_not() -> None:
    assert as_index(np.array([1, 2, 3])) == slice(1, 4)
    for blocks in ([4, 2], [1, 1], []):
        chosen = np.array(blocks, np.int64)
        assert as_index(chosen) is chosen


@pytest.mark.parametrize("elements", [3, SINGLE_BLOCK_BYTES // 8])
@pytest.mark.parametrize("kind", [torch, np])
@pytest.mark.parametrize("blocks", [[1, 2, 3], [4, 0, 3], []])
def test_blocks_come_out_in_order_and_go_back_to_their_places(kind: Any, blocks: list[int], elements: int) -> None:
    pool: Any = kind.arange(6 * elements * 2).reshape(6, elements, 2) * 1.0
    index = as_index(np.array(blocks, np.int64))
    out: Any = kind.zeros((2, elements, len(blocks)))
    view = out.permute(2, 1, 0) if is_tensor(out) else out.transpose(2, 1, 0)
    gather(pool, index, view)
    assert np.array_equal(np.asarray(view), np.asarray(pool)[np.array(blocks, np.int64)])
    other: Any = kind.zeros((6, elements, 2))
    scatter(view, other, index)
    expected = np.zeros((6, elements, 2))
    expected[np.array(blocks, np.int64)] = np.asarray(view)
    assert np.array_equal(np.asarray(other), expected)


def test_tensors_that_only_inference_may_write_are_written() -> None:
    with torch.inference_mode():
        pool = torch.zeros(4, 2)
    for index in (slice(0, 2), np.array([3, 0])):
        scatter(torch.ones(2, 2), pool, index)
    assert pool[:, 0].tolist() == [1, 1, 0, 1]
