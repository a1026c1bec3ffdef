"""Staging memory between an engine's tensors and stored values, and the copies and codecs between the two. No requests.

Values have the format of kvcache/codecs/tensor_value.py, in rows of `uint8 [blocks, value_bytes]`, many of one kind at
a time. Raw elements are copied once, from any strides; other schemes are encoded and decoded on the tensors' device.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.client.tensors.arrays import Index, gather, is_tensor, scatter, write_mode
from kvstore.client.tensors.config import TensorSettings
from kvstore.kvcache.codecs.tensor_value import HEADER_BYTES, TensorHeader, without_others
from kvstore.protocol.errors import InvalidArgument

Rows: TypeAlias = NDArray[np.uint8]

_ALIGN_BYTES: Final = 64


class PoolPiece(NamedTuple):
    """One tensor's share of some values."""

    layers: slice
    """Layers, relative to the values."""
    kinds: slice
    """Slice over K (0) and V (1)."""
    heads: slice
    """Heads, relative to the values; all of them when writing."""
    tensor: Any
    """`[pool blocks, layers, kinds, heads, tokens, head_dim]` of any strides: a torch tensor on any device, or a numpy
    array."""
    blocks: Index
    """Block indexes of the tensor, one per value."""


class PoolStaging:
    """Staging memory of one call, for as many blocks as fit into `size_bytes`, and at least one. Each `rows` reuses the
    memory."""

    def __init__(self, size_bytes: int, *, is_pinned: bool = False) -> None:
        """`is_pinned`: allocate page-locked memory, which a GPU copies fastest."""
        self._size_bytes = size_bytes
        self._memory: Rows = np.empty(0, np.uint8)
        self.is_pinned = is_pinned

    @property
    def kept_bytes(self) -> int:
        return len(self._memory)

    def blocks(self, value_bytes: Sequence[int]) -> int:
        """Maximum number of blocks for `rows`, for values of these sizes."""
        return max(1, self._size_bytes // sum(value_bytes))

    def rows(self, blocks: int, value_bytes: Sequence[int]) -> list[Rows]:
        """For each value of a block, an array of `[blocks, value_bytes]`. Content is undefined."""
        starts = [0]
        for size_bytes in value_bytes:
            starts.append(starts[-1] + -(-blocks * size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
        if starts[-1] > len(self._memory):
            # Allocate the full size: untouched memory costs nothing, and growing would fault the pages in again.
            needed_bytes = max(starts[-1], self._size_bytes + len(value_bytes) * _ALIGN_BYTES)
            self._memory = _pinned(needed_bytes) if self.is_pinned else np.empty(needed_bytes, np.uint8)
        return [
            self._memory[start : start + blocks * size_bytes].reshape(blocks, size_bytes)
            for start, size_bytes in zip(starts, value_bytes, strict=False)
        ]


class Stagings:
    """Pool of staging memory of one cache, a lease per call. Thread-safe."""

    def __init__(self, settings: TensorSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._kept: list[PoolStaging] = []

    @property
    def kept_bytes(self) -> int:
        return sum(staging.kept_bytes for staging in self._kept)

    @contextlib.contextmanager
    def lend(self, *, is_pinned: bool) -> Iterator[PoolStaging]:
        """Lease staging memory for the context; it is kept afterwards, up to `kept_bytes`."""
        staging = self._take(is_pinned)
        try:
            yield staging
        finally:
            with self._lock:
                if self.kept_bytes + staging.kept_bytes <= int(self._settings.kept_bytes):
                    self._kept.append(staging)

    def _take(self, is_pinned: bool) -> PoolStaging:
        with self._lock:
            for staging in reversed(self._kept):  # the last one used is in the processor's cache
                if staging.is_pinned == is_pinned:
                    self._kept.remove(staging)
                    return staging
        return PoolStaging(int(self._settings.staging_bytes), is_pinned=is_pinned)


def are_values(rows: Rows, sizes_bytes: NDArray[np.int64], header: TensorHeader) -> bool:
    """Return whether each row holds a value with this header; `sizes_bytes` are the sizes read."""
    wanted = np.frombuffer(header.pack(), np.uint8)
    return bool((sizes_bytes == header.value_bytes).all() and (rows[:, :HEADER_BYTES] == wanted).all())


def write_values(rows: Rows, header: TensorHeader, pieces: Sequence[PoolPiece]) -> None:
    """Encode one block's value into each row, from pieces that cover all its layers and kinds.

    Pieces are on one device; numpy arrays require a raw scheme. Raises InvalidArgument for finite numbers that the
    scheme cannot represent; non-finite ones become NaN.
    """
    first = pieces[0].tensor
    if not is_tensor(first):
        rows[:, :HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
        elements = _raw_array(rows, header, first.dtype)
        for piece in pieces:
            gather(piece.tensor, piece.blocks, elements[:, piece.layers, piece.kinds])
        return
    import torch

    host = torch.from_numpy(rows)
    work = host if first.device == host.device else torch.empty_like(host, device=first.device)
    work[:, :HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8).to(work.device)
    body = work[:, HEADER_BYTES:]
    for piece in pieces:
        tensor = piece.tensor.detach()
        if header.scheme.is_raw:
            gather(tensor, piece.blocks, _raw_tensor(body, header, tensor.dtype)[:, piece.layers, piece.kinds])
        else:
            _encode(tensor[piece.blocks], header, piece, body)
    host.copy_(work)
    if _has_lost(host[:, HEADER_BYTES:], header) and _loses_finite(header, pieces, body):
        raise InvalidArgument(f"values exceed the float16 scales of {header.scheme.name}: use fp8-head, whose scales are float32")


def read_values(rows: Rows, header: TensorHeader, pieces: Sequence[PoolPiece]) -> None:
    """Decode each row's value into the pieces: their layers, kinds and heads.

    Pieces are on one device; numpy arrays require a raw scheme.
    """
    first = pieces[0].tensor
    if not is_tensor(first):
        elements = _raw_array(rows, header, first.dtype)
        for piece in pieces:
            scatter(elements[:, piece.layers, piece.kinds, piece.heads], piece.tensor, piece.blocks)
        return
    import torch

    body = torch.from_numpy(rows).to(first.device)[:, HEADER_BYTES:]
    for piece in pieces:
        if header.scheme.is_raw:
            scatter(_raw_tensor(body, header, first.dtype)[:, piece.layers, piece.kinds, piece.heads], piece.tensor, piece.blocks)
        else:
            _decode(body, header, piece)


def _encode(values: Any, header: TensorHeader, piece: PoolPiece, body: Any) -> None:
    from kvstore.kvcache.codecs.codec import encode

    for at, kv in enumerate(range(header.kv_factor)[piece.kinds]):
        encode(values[:, :, at], header.scheme.of(kv == 0), is_key=kv == 0, out=_records(body, header, kv)[:, piece.layers])


def _decode(body: Any, header: TensorHeader, piece: PoolPiece) -> None:
    from kvstore.kvcache.codecs.codec import decode

    with write_mode():
        in_place = isinstance(piece.blocks, slice)
        out = piece.tensor[piece.blocks] if in_place else piece.tensor.new_empty((len(body), *piece.tensor.shape[1:]))
        sizes = {"tokens": header.tokens, "head_dim": header.head_dim, "dtype": out.dtype}
        for at, kv in enumerate(range(header.kv_factor)[piece.kinds]):
            records = _records(body, header, kv)[:, piece.layers, piece.heads]
            decode(records, header.scheme.of(kv == 0), is_key=kv == 0, **sizes, out=out[:, :, at])
    if not in_place:
        scatter(out, piece.tensor, piece.blocks)


def _raw_tensor(body: Any, header: TensorHeader, dtype: Any) -> Any:
    """Elements of raw values, in place: `[blocks, layers, kinds, heads, tokens, head_dim]`."""
    return body.view(dtype).unflatten(-1, header.shape)


def _raw_array(rows: Rows, header: TensorHeader, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Elements of raw values, in place."""
    return rows[:, HEADER_BYTES:].view(dtype).reshape(len(rows), *header.shape)


def _records(body: Any, header: TensorHeader, kv: int) -> Any:
    """Records of K (0) or V (1), in place: `[blocks, layers, heads, record_bytes]`."""
    sizes = [header.heads * header.record_bytes(is_key=index == 0) for index in range(header.kv_factor)]
    of_layers = body.unflatten(-1, (header.layers, sum(sizes)))
    start = sum(sizes[:kv])
    return of_layers[..., start : start + sizes[kv]].unflatten(-1, (header.heads, -1))


def _loses_finite(header: TensorHeader, pieces: Sequence[PoolPiece], body: Any) -> bool:
    """Return whether finite numbers became NaN, too; `body` is the encoded form."""
    again = body.new_empty(body.shape)
    for piece in pieces:
        _encode(without_others(piece.tensor.detach()[piece.blocks]), header, piece, again)
    return _has_lost(again, header)


def _has_lost(body: Any, header: TensorHeader) -> bool:
    """Return whether the codecs produced NaN."""
    from kvstore.kvcache.codecs.codec import has_lost

    shape = {"tokens": header.tokens, "head_dim": header.head_dim}
    return any(has_lost(_records(body, header, kv), header.scheme.of(kv == 0), is_key=kv == 0, **shape) for kv in range(header.kv_factor))


def _pinned(size_bytes: int) -> Rows:  # pragma: no cover  (runs on CUDA only)
    import torch

    memory: Rows = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory
