"""Choice of the bytes that stand for a checkpoint: few enough to read in seconds, spread over all its tensors.

A checkpoint with at most MAX_SAMPLES tensors has a sample in each; the rest go to tensors by their size. One with more has a sample in each
tensor of the kinds that occur least (embeddings, norms, attention), and in tensors evenly spread over the other kinds (experts).
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.engines.weights.tensors import Tensor

MAX_SAMPLES: Final = 4096
SAMPLE_BYTES: Final = 4096
"""A disk reads no less at once."""
EDGE_BYTES: Final = 256 * 1024
"""Beginning and end of a file whose header is not read. GGUF describes its tensors there, torch.save has their checksums there."""
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
    """MAX_SAMPLES of them. Tensors of a kind differ in the numbers of their names only: of the layer, the expert."""
    kinds: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[_NUMBER.sub("#", tensor.name)].append(tensor)
    chosen: list[Tensor] = []
    ordered = sorted(kinds.values(), key=len)
    while ordered and len(chosen) + len(ordered[0]) <= MAX_SAMPLES:
        chosen += ordered.pop(0)
    others, room = [tensor for kind in ordered for tensor in kind], MAX_SAMPLES - len(chosen)
    return chosen + [others[place * len(others) // room] for place in range(room)]


def _spread(tensor: Tensor, count: int) -> list[Range]:
    """`count` samples of a tensor, or all of it where that is no more."""
    if tensor.size_bytes <= count * SAMPLE_BYTES:
        return [Range(tensor.file, start, min(start + SAMPLE_BYTES, tensor.end)) for start in range(tensor.start, tensor.end, SAMPLE_BYTES)]
    gap = tensor.size_bytes - SAMPLE_BYTES
    starts = [tensor.start + gap * (2 * place + 1) // (2 * count) for place in range(count)]
    return [Range(tensor.file, start, start + SAMPLE_BYTES) for start in starts]
