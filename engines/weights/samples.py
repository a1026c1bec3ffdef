"""Tensors of a checkpoint, and the byte ranges that are sampled for its fingerprint.

**Tensors.** Byte ranges come from the header of a safetensors file: u64 length of the header (little-endian), header as
JSON, the tensors' bytes (source: the safetensors format). A file of another format is one range.

**Samples** are few enough to read in seconds and spread over all tensors. If a checkpoint has at most MAX_SAMPLES
tensors, each has a sample, and further samples are distributed by size. Otherwise each tensor of the rarest kinds has
one (embeddings, norms, attention), and tensors spread evenly over the other kinds (experts).
"""

import json
import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvstore.engines.weights.files import WeightFile
from kvstore.protocol.errors import ConfigError

MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the safetensors library."""
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
class SafetensorsHeader:
    """Contents of one file's header."""

    digest: bytes
    """Hash of all its bytes; empty for other formats."""
    tensors: list[Tensor]
    """In order of start."""


def read_header(file: WeightFile, index: int) -> SafetensorsHeader:
    """Read the header of file number `index` of a checkpoint.

    Raises:
        ConfigError: the file has a safetensors name and no valid header, is truncated, or cannot be read.
    """
    if not file.name.lower().endswith(".safetensors"):
        return SafetensorsHeader(b"", [Tensor(index, file.name, 0, file.size_bytes)])
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
    return SafetensorsHeader(xxhash.xxh3_128_digest(raw), tensors)


def _tensors(header: dict[str, Any], index: int, data_start: int) -> list[Tensor]:
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            if not 0 <= start <= end:
                raise ValueError(f"offsets [{start}, {end}) of {name}")
            tensors.append(Tensor(index, name, data_start + start, data_start + end))
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.name))


MAX_SAMPLES: Final = 4096
SAMPLE_BYTES: Final = 4096
"""Smallest read of a disk."""
EDGE_BYTES: Final = 256 * 1024
"""Sample of the beginning and end of files without a readable header. GGUF describes its tensors there, torch.save
has their checksums."""
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Bytes [start, end) of file number `file`."""

    file: int
    start: int
    end: int


def choose_samples(tensors: Sequence[Tensor]) -> list[Range]:
    """Return at most MAX_SAMPLES ranges, in order of file and start. Equal for equal tensors."""
    filled = [tensor for tensor in tensors if tensor.size_bytes]
    chosen = filled if len(filled) <= MAX_SAMPLES else _fewest_kinds_first(filled)
    spare, total_bytes = MAX_SAMPLES - len(chosen), sum(tensor.size_bytes for tensor in chosen)
    return sorted(piece for tensor in chosen for piece in _spread(tensor, 1 + spare * tensor.size_bytes // total_bytes))


def edges(file: int, size_bytes: int) -> list[Range]:
    """Return the beginning and the end of file number `file`."""
    return [Range(file, 0, min(EDGE_BYTES, size_bytes)), Range(file, max(0, size_bytes - EDGE_BYTES), size_bytes)]


def _fewest_kinds_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return MAX_SAMPLES of the tensors. Names of tensors of one kind differ only in numbers, of the layer or the
    expert."""
    kinds: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[_NUMBER.sub("#", tensor.name)].append(tensor)
    chosen: list[Tensor] = []
    ordered = sorted(kinds.values(), key=len)
    while ordered and len(chosen) + len(ordered[0]) <= MAX_SAMPLES:
        chosen += ordered.pop(0)
    others, remaining = [tensor for kind in ordered for tensor in kind], MAX_SAMPLES - len(chosen)
    return chosen + [others[place * len(others) // remaining] for place in range(remaining)]


def _spread(tensor: Tensor, count: int) -> list[Range]:
    """Return `count` samples of a tensor, or all of it if that is no more."""
    if tensor.size_bytes <= count * SAMPLE_BYTES:
        return [Range(tensor.file, start, min(start + SAMPLE_BYTES, tensor.end)) for start in range(tensor.start, tensor.end, SAMPLE_BYTES)]
    gap = tensor.size_bytes - SAMPLE_BYTES
    starts = [tensor.start + gap * (2 * place + 1) // (2 * count) for place in range(count)]
    return [Range(tensor.file, start, start + SAMPLE_BYTES) for start in starts]
