"""Bytes sampled to identify a checkpoint.

Positions of tensors in a file, and files without tensors.
"""

import itertools
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engines.weights.files import list_files
from kvstore.engines.weights.samples import (
    EDGE_BYTES,
    MAX_SAMPLES,
    SAMPLE_BYTES,
    Range,
    SafetensorsHeader,
    Tensor,
    choose_samples,
    edges,
    read_header,
)
from kvstore.protocol.errors import ConfigError
from tests.engines.weights.checkpoints import safetensors


def tensors(sizes: list[int], name: str = "layers.{}.weight") -> list[Tensor]:
    found, start = [], 100
    for index, size in enumerate(sizes):
        found.append(Tensor(0, name.format(index), start, start + size))
        start += size
    return found


@given(st.lists(st.integers(0, 3 * SAMPLE_BYTES), max_size=50) | st.lists(st.integers(0, 10**10), max_size=50))
def test_choose_samples_within_tensors(sizes: list[int]) -> None:
    """Each tensor that has bytes has a sample; samples lie in it, do not overlap and are no more than allowed."""
    given_tensors = tensors(sizes)
    chosen = choose_samples(given_tensors)
    assert len(chosen) <= MAX_SAMPLES
    assert all(0 < piece.end - piece.start <= SAMPLE_BYTES for piece in chosen)
    assert all(before.end <= after.start for before, after in itertools.pairwise(chosen))
    for tensor in given_tensors:
        inside = [piece for piece in chosen if tensor.start <= piece.start and piece.end <= tensor.end]
        assert bool(inside) == bool(tensor.size_bytes)


def test_choose_samples_small_checkpoint_whole() -> None:
    chosen = choose_samples(tensors([SAMPLE_BYTES * 4, 10, SAMPLE_BYTES + 1]))
    assert sum(piece.end - piece.start for piece in chosen) == 5 * SAMPLE_BYTES + 11


def test_choose_samples_by_size() -> None:
    """A large tensor has more of them than a small one."""
    chosen = choose_samples(tensors([10**9, 10**6]))
    assert len(chosen) <= MAX_SAMPLES
    assert sum(piece.start < 100 + 10**9 for piece in chosen) > 4000


def test_choose_samples_of_many_tensors() -> None:
    """Beyond the limit: all tensors of rare kinds, and some of the common one, over all of it."""
    rare, common = tensors([5000] * 60, "layers.{}.norm"), tensors([5000] * 20_000, "experts.{}.weight")
    chosen = choose_samples([*rare, *(Tensor(1, each.name, each.start, each.end) for each in common)])
    assert len(chosen) == MAX_SAMPLES
    assert sum(piece.file == 0 for piece in chosen) == 60
    starts = [piece.start for piece in chosen if piece.file == 1]
    assert max(after - before for before, after in itertools.pairwise(starts)) <= 6 * 5000


def test_choose_samples_of_kinds_that_fill_the_limit() -> None:
    assert len(choose_samples([*tensors([10] * MAX_SAMPLES, "a.{}"), *tensors([10] * MAX_SAMPLES, "b.{}")])) == MAX_SAMPLES


def test_edges_of_small_and_large_files() -> None:
    assert edges(1, 10) == [Range(1, 0, 10), Range(1, 0, 10)]
    assert edges(1, 10**9) == [Range(1, 0, EDGE_BYTES), Range(1, 10**9 - EDGE_BYTES, 10**9)]


def header(folder: Path, value: bytes, name: str = "model.safetensors") -> SafetensorsHeader:
    (folder / name).write_bytes(value)
    return read_header(list_files(folder)[0], 3)


def test_read_header_of_safetensors(tmp_path: Path) -> None:
    """Ranges in the file, by their start; the digest covers metadata, too."""
    value = safetensors({"b": b"12", "a": b"345"}, metadata={"format": "pt"})
    found = header(tmp_path, value)
    assert [(tensor.file, tensor.name, value[tensor.start : tensor.end]) for tensor in found.tensors] == [(3, "b", b"12"), (3, "a", b"345")]
    assert [tensor.size_bytes for tensor in found.tensors] == [2, 3]
    assert len(found.digest) == 16
    assert found.digest != header(tmp_path, safetensors({"b": b"12", "a": b"345"}, metadata={"format": "np"})).digest


def test_read_header_of_other_formats(tmp_path: Path) -> None:
    assert header(tmp_path, b"x" * 7, "model.gguf") == SafetensorsHeader(b"", [Tensor(3, "model.gguf", 0, 7)])


def test_read_header_without_tensors(tmp_path: Path) -> None:
    assert header(tmp_path, safetensors({})).tensors == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "no safetensors header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (struct.pack("<Q", 500) + b"{}", "truncated"),
        (safetensors({"a": b"345"})[:-1], r"is truncated: \d+ bytes, its header needs \d+"),
        (safetensors({"a": b"345"}, offset=-8), "malformed safetensors header"),
        (struct.pack("<Q", 2) + b"[]", "malformed safetensors header"),
        (struct.pack("<Q", 3) + b"{a}", "malformed safetensors header"),
        (struct.pack("<Q", len(raw := json.dumps({"a": {}}).encode())) + raw, "malformed safetensors header"),
    ],
)
def test_read_header_damaged(tmp_path: Path, value: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.safetensors.*{message}"):
        header(tmp_path, value)


def test_read_header_unreadable(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    file = list_files(tmp_path)[0]
    file.path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*model.safetensors: No such file"):
        read_header(file, 0)
