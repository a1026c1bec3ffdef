"""Where tensors lie in a file, and files that are none."""

import json
import struct
from pathlib import Path

import pytest

from kvstore.engines.weights.files import list_files
from kvstore.engines.weights.tensors import Header, Tensor, read_header
from kvstore.protocol.errors import ConfigError
from tests.engines.weights.checkpoints import safetensors


def header(folder: Path, value: bytes, name: str = "model.safetensors") -> Header:
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
    assert header(tmp_path, b"x" * 7, "model.gguf") == Header(b"", [Tensor(3, "model.gguf", 0, 7)])


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
