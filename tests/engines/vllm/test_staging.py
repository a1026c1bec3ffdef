"""Chunks of memory are made when they are needed, kept, and never more than allowed."""

import pytest

from kvstore.engines.vllm.staging import CHUNK_BYTES, Staging, rows


@pytest.mark.parametrize(("value_bytes", "values"), [(1 << 20, 16), ((1 << 20) + 1, 15), (CHUNK_BYTES, 1), (2 * CHUNK_BYTES, 1)])
def test_a_chunk_is_of_whole_values(value_bytes: int, values: int) -> None:
    staging = Staging(value_bytes, 0)
    chunk = staging.take()
    assert chunk is not None
    assert staging.values(value_bytes) == values
    assert rows(chunk, values, value_bytes).shape == (values, value_bytes)


def test_a_chunk_has_room_for_many_small_values() -> None:
    assert Staging(2 * CHUNK_BYTES, 0).values(1 << 20) == 32


def test_there_are_only_so_many_and_those_given_back_are_used_again() -> None:
    staging = Staging(1 << 20, 2 * CHUNK_BYTES)
    first, second = staging.take(), staging.take()
    assert first is not None
    assert second is not None
    assert staging.take() is None
    staging.give_back(first)
    again = staging.take()
    assert again is not None
    assert again.data_ptr() == first.data_ptr() != second.data_ptr()


def test_a_chunk_that_there_was_no_memory_for_may_be_tried_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(1 << 20, CHUNK_BYTES)

    def no_memory(*_size: int, **_kind: object) -> None:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as without, pytest.raises(RuntimeError, match="not enough"):
        without.setattr("kvstore.engines.vllm.staging.torch.empty", no_memory)
        staging.take()
    assert staging.take() is not None
    assert staging.take() is None
