"""Memory between a caller's tensor and the values of the store, and what moves between the two: copies and codecs, no requests.

Values are put together in the form of `kvcache/codecs/tensor_value.py`, many of one kind at a time: rows of `uint8 [blocks, value_bytes]`.
Raw elements are copied once, whatever the strides of the tensor; other schemes are encoded and decoded on the tensor's own device.
"""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.codecs.tensor_value import HEADER_BYTES, TensorHeader
from kvstore.protocol.errors import InvalidArgument

Rows: TypeAlias = NDArray[np.uint8]

STAGING_BYTES: Final = 64 << 20
"""Memory that one TensorCache keeps, unless the values of a single block need more: large enough that a batch's round trip does not count,
and kept, since memory that is touched for the first time is many times slower than a copy."""
_ALIGN_BYTES: Final = 64


class Staging:
    """Rows for so many blocks at once as STAGING_BYTES hold. The next `rows` takes the memory of those before."""

    def __init__(self, value_bytes: Sequence[int]) -> None:
        """`value_bytes`: the size of each value of one block."""
        self._value_bytes = value_bytes
        self._memory: Rows = np.empty(0, np.uint8)
        self.blocks = max(1, STAGING_BYTES // sum(value_bytes))
        """The most blocks that `rows` may be asked for."""

    def rows(self, blocks: int, *, is_pinned: bool) -> list[Rows]:
        """For each value of a block an array of `[blocks, value_bytes]`. Content is undefined. Memory that is made now can be pinned, which
        is what a GPU copies to and from fastest."""
        starts = [0]
        for size_bytes in self._value_bytes:
            starts.append(starts[-1] + -(-blocks * size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
        if starts[-1] > len(self._memory):
            self._memory = _pinned(starts[-1]) if is_pinned else np.empty(starts[-1], np.uint8)
        return [
            self._memory[start : start + blocks * size_bytes].reshape(blocks, size_bytes)
            for start, size_bytes in zip(starts, self._value_bytes, strict=False)
        ]


def is_tensor(values: object) -> bool:
    """Whether it is a torch tensor. Only a process that has imported torch can hold one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def as_index(blocks: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """A run as a slice, by which a tensor gives a view; others give a copy, and need `put_back`."""
    if len(blocks) and (np.diff(blocks) == 1).all():
        return slice(int(blocks[0]), int(blocks[-1]) + 1)
    return blocks


def put_back(tensor: Any, index: slice | NDArray[np.int64], shard: Any) -> None:
    """Bring what was read into `shard = tensor[index]` to its place, if it is not there."""
    if not isinstance(index, slice):
        with _writing(tensor):
            tensor[index] = shard


def are_values(rows: Rows, sizes_bytes: NDArray[np.int64], header: TensorHeader) -> bool:
    """Whether each row holds a value of this header; `sizes_bytes` is what was read into it."""
    wanted = np.frombuffer(header.pack(), np.uint8)
    return bool((sizes_bytes == header.value_bytes).all() and (rows[:, :HEADER_BYTES] == wanted).all())


def write_values(rows: Rows, header: TensorHeader, values: Any) -> None:
    """Make each row the value of one block of `values`.

    `values [blocks, layers, kv, heads, tokens, head_dim]` of any strides is a torch tensor on any device, or, if the scheme is raw, a numpy
    array. Raises InvalidArgument for finite numbers that the scheme would lose; non-finite ones it keeps as NaN.
    """
    if not is_tensor(values):
        rows[:, :HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
        _raw_array(rows, header, values.dtype)[...] = values
        return
    import torch

    host = torch.from_numpy(rows)
    values = values.detach()
    work = host if values.device == host.device else torch.empty_like(host, device=values.device)
    work[:, :HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8).to(work.device)
    body = work[:, HEADER_BYTES:]
    if header.scheme.is_raw:
        body.view(values.dtype).unflatten(-1, header.shape).copy_(values)
    else:
        from kvstore.kvcache.codecs.codec import encode

        for kv in range(header.kv_factor):
            encode(values[:, :, kv], header.scheme.of(kv == 0), is_key=kv == 0, out=_records(body, header, kv))
    host.copy_(work)
    if _has_lost(host, header) and values.isfinite().all():
        raise InvalidArgument(f"numbers too large for the float16 scales of {header.scheme.name}: use fp8-head, whose scales are float32")


def read_values(rows: Rows, header: TensorHeader, layers: slice, heads: slice, out: Any) -> None:
    """Read these layers and heads of each row's value into `out [blocks, layers, kv, heads, tokens, head_dim]`.

    `out` of any strides is a torch tensor on any device, or, if the scheme is raw, a numpy array.
    """
    if is_tensor(out):
        with _writing(out):
            _read_tensor(rows, header, layers, heads, out)
    else:
        out[...] = _raw_array(rows, header, out.dtype)[:, layers, :, heads]


def _read_tensor(rows: Rows, header: TensorHeader, layers: slice, heads: slice, out: Any) -> None:
    import torch

    body = torch.from_numpy(rows).to(out.device)[:, HEADER_BYTES:]
    if header.scheme.is_raw:
        out.copy_(body.view(out.dtype).unflatten(-1, header.shape)[:, layers, :, heads])
        return
    from kvstore.kvcache.codecs.codec import decode

    for kv in range(header.kv_factor):
        records = _records(body, header, kv)[:, layers, heads]
        scheme = header.scheme.of(kv == 0)
        sizes = {"tokens": header.tokens, "head_dim": header.head_dim, "dtype": out.dtype}
        decode(records, scheme, is_key=kv == 0, **sizes, out=out[:, :, kv])


def _writing(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """In which any tensor may be written, also one that was made in inference mode, or requires a gradient."""
    if not is_tensor(tensor):
        return contextlib.nullcontext()
    import torch

    context: contextlib.AbstractContextManager[Any] = torch.inference_mode()
    return context


def _raw_array(rows: Rows, header: TensorHeader, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The elements of raw values, in place."""
    return rows[:, HEADER_BYTES:].view(dtype).reshape(len(rows), *header.shape)


def _records(body: Any, header: TensorHeader, kv: int) -> Any:
    """The records of K (0) or V (1) in place: `[blocks, layers, heads, record_bytes]`."""
    sizes = [header.heads * header.record_bytes(is_key=index == 0) for index in range(header.kv_factor)]
    of_layers = body.unflatten(-1, (header.layers, sum(sizes)))
    start = sum(sizes[:kv])
    return of_layers[..., start : start + sizes[kv]].unflatten(-1, (header.heads, -1))


def _has_lost(rows: Any, header: TensorHeader) -> bool:
    """Whether the codecs made NaN of something."""
    from kvstore.kvcache.codecs.codec import has_lost

    body, shape = rows[:, HEADER_BYTES:], {"tokens": header.tokens, "head_dim": header.head_dim}
    return any(has_lost(_records(body, header, kv), header.scheme.of(kv == 0), is_key=kv == 0, **shape) for kv in range(header.kv_factor))


def _pinned(size_bytes: int) -> Rows:  # pragma: no cover  (runs on CUDA only)
    import torch

    memory: Rows = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory
