"""Byte ranges of the tensors in a weight file, as its header gives them.

Source: the safetensors format: u64 length of the header (little-endian), the header as JSON, the tensors' bytes. Other formats have no
header that this module reads: their tensors are one range, the whole file.
"""

import json
import struct
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvstore.engines.weights.files import WeightFile
from kvstore.protocol.errors import ConfigError

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Bytes [start, end) of one tensor in file number `file` of a checkpoint."""

    file: int
    name: str
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of one file's header."""

    digest: bytes
    """Of all its bytes; empty where the format has none."""
    tensors: list[Tensor]
    """By rising start."""


def read_header(file: WeightFile, index: int) -> Header:
    """Read the header of file number `index` of a checkpoint.

    Raises:
        ConfigError: the file is not safetensors though its name says so, is truncated, or cannot be read.
    """
    if not file.name.lower().endswith(".safetensors"):
        return Header(b"", [Tensor(index, file.name, 0, file.size_bytes)])
    try:
        with open(file.path, "rb", buffering=0) as opened:
            prefix = opened.read(_LENGTH.size)
            length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
            if not 0 < length <= min(MAX_HEADER_BYTES, file.size_bytes - _LENGTH.size):
                raise ConfigError(f"{file.path} has no safetensors header: truncated, or a Git LFS pointer? Copy it again")
            raw = opened.read(length)
    except OSError as error:
        raise ConfigError(f"cannot read {file.path}: {error.strerror or error}") from error
    try:
        tensors = _tensors(json.loads(raw), index, _LENGTH.size + length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file.path} has a malformed safetensors header: {error!r}. Copy the file again") from error
    last = max((tensor.end for tensor in tensors), default=0)
    if last > file.size_bytes:
        raise ConfigError(f"{file.path} is truncated: {file.size_bytes} bytes, its header needs {last}. Copy the file again")
    return Header(xxhash.xxh3_128_digest(raw), tensors)


def _tensors(header: dict[str, Any], index: int, data_start: int) -> list[Tensor]:
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            if not 0 <= start <= end:
                raise ValueError(f"offsets [{start}, {end}) of {name}")
            tensors.append(Tensor(index, name, data_start + start, data_start + end))
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.name))
