"""Torch tensors and numpy arrays alike: which of the two it is, and copies of chosen blocks, as fast as each library makes them.

Copies from and to a GPU go on streams of their own: the engine's kernels go on meanwhile. A call marks what its caller's stream has been
given so far; copies wait for that, and the host for the copies, not for what the engine has given its streams since.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

Index: TypeAlias = slice | NDArray[np.int64]

SINGLE_BLOCK_BYTES: Final = 16 << 10
"""Blocks of a CPU tensor from this size on are copied one by one, which takes half the time of an indexed copy; below that each copy's
few microseconds count."""


def is_tensor(values: object) -> bool:
    """Whether it is a torch tensor. Only a process that has imported torch can hold one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def as_index(blocks: NDArray[np.int64]) -> Index:
    """A run as a slice, by which a tensor gives a view; others give a copy."""
    if len(blocks) and (np.diff(blocks) == 1).all():
        return slice(int(blocks[0]), int(blocks[-1]) + 1)
    return blocks


def gather(values: Any, index: Index, out: Any) -> None:
    """Copy `values[index]`, blocks along the first axis, into `out`, of any strides. CUDA tensors: in the current stream."""
    if not is_tensor(values):
        out[...] = values[index]
    elif _is_one_by_one(index, values):
        for row, block in zip(out, index, strict=True):
            row.copy_(values[block])
    else:
        out.copy_(values[index])


def scatter(source: Any, values: Any, index: Index) -> None:
    """Copy `source` into `values[index]`: the reverse of `gather`. `values` may be any tensor, made in inference mode too."""
    if not is_tensor(values):
        values[index] = source
        return
    with writing():
        if isinstance(index, slice):
            values[index].copy_(source)
        elif _is_one_by_one(index, values):
            for row, block in zip(source, index, strict=True):
                values[block].copy_(row)
        else:
            values[index] = source


def writing() -> contextlib.AbstractContextManager[Any]:
    """In which any tensor may be written, also one that was made in inference mode, or requires a gradient."""
    import torch

    context: contextlib.AbstractContextManager[Any] = torch.inference_mode()
    return context


def _is_one_by_one(index: Index, values: Any) -> TypeGuard[NDArray[np.int64]]:
    block_bytes = values[:1].numel() * values.element_size()
    return not isinstance(index, slice) and values.device.type == "cpu" and block_bytes >= SINGLE_BLOCK_BYTES


_of_thread = threading.local()


def mark(device: Any) -> Any:
    """An event after all that the caller's current stream was given; None on the CPU. In the caller's thread: others have other streams."""
    if device is None or device.type != "cuda":
        return None
    import torch  # pragma: no cover  (runs on CUDA only)

    return torch.cuda.current_stream(device).record_event()  # pragma: no cover


@contextlib.contextmanager
def beside(device: Any, marked: Any) -> Iterator[None]:
    """In which copies of this device go to a stream of this thread, after what was marked; they are over when it ends."""
    if marked is None:
        yield
        return
    import torch  # pragma: no cover  (runs on CUDA only)

    side = _side(device)  # pragma: no cover
    side.wait_event(marked)  # pragma: no cover
    try:  # pragma: no cover
        with torch.cuda.stream(side):
            yield
    finally:  # pragma: no cover
        side.record_event().synchronize()


def _side(device: Any) -> Any:  # pragma: no cover  (runs on CUDA only)
    import torch

    streams: dict[Any, Any] = _of_thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]
