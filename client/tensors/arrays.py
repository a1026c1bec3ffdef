"""Copies of chosen blocks of torch tensors or numpy arrays, each by the fastest means of its library.

Copies from and to a GPU run on streams of their own, beside the engine's kernels. `mark` records an event on the
caller's stream; the copies wait for it, and the host waits for the copies, not for later work of the engine.
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
"""Blocks of a CPU tensor from this size on are copied one by one, in half the time of an indexed copy; for smaller ones
the few microseconds of each copy dominate."""


def is_tensor(values: object) -> bool:
    """Return whether it is a torch tensor; one can exist only if torch has been imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def as_index(blocks: NDArray[np.int64]) -> Index:
    """A run of blocks as a slice, which gives a view; otherwise the indexes, which give a copy."""
    if len(blocks) and (np.diff(blocks) == 1).all():
        return slice(int(blocks[0]), int(blocks[-1]) + 1)
    return blocks


def placed(index: Index, device: Any) -> Any:
    """The index for values on `device`; a GPU gets its own copy, once and not for each tensor that it indexes."""
    if isinstance(index, slice) or device is None or device.type == "cpu":
        return index
    import torch  # pragma: no cover  (runs on GPUs only)

    return torch.from_numpy(index).to(device)  # pragma: no cover


def gather(values: Any, index: Index, out: Any) -> None:
    """Copy `values[index]`, blocks along the first axis, into `out`, of any strides. CUDA tensors: in the current
    stream."""
    if not is_tensor(values):
        out[...] = values[index]
    elif _is_one_by_one(index, values):
        for row, block in zip(out, index, strict=True):
            row.copy_(values[block])
    else:
        out.copy_(values[index])


def scatter(source: Any, values: Any, index: Index) -> None:
    """Copy `source` into `values[index]`: the reverse of `gather`. `values` may be any tensor, made in inference mode
    too."""
    if not is_tensor(values):
        values[index] = source
        return
    with write_mode():
        if isinstance(index, slice):
            values[index].copy_(source)
        elif _is_one_by_one(index, values):
            for row, block in zip(source, index, strict=True):
                values[block].copy_(row)
        else:
            values[index] = source


def write_mode() -> contextlib.AbstractContextManager[Any]:
    """Context in which any tensor may be written, including inference tensors and those that require a gradient."""
    import torch

    context: contextlib.AbstractContextManager[Any] = torch.inference_mode()
    return context


def _is_one_by_one(index: Index, values: Any) -> TypeGuard[NDArray[np.int64]]:
    block_bytes = values[:1].numel() * values.element_size()
    return not isinstance(index, slice) and values.device.type == "cpu" and block_bytes >= SINGLE_BLOCK_BYTES


_of_thread = threading.local()


def mark(device: Any) -> Any:
    """Record an event on the caller's current stream; None on the CPU. Call it in the caller's thread: streams are per
    thread."""
    if device is None or device.type != "cuda":
        return None
    import torch  # pragma: no cover  (runs on CUDA only)

    return torch.cuda.current_stream(device).record_event()  # pragma: no cover


@contextlib.contextmanager
def on_side_stream(device: Any, marked: Any) -> Iterator[None]:
    """Context in which copies of this device run on this thread's own stream, after the marked event; they are complete
    at its end."""
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
