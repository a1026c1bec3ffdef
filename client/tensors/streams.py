"""Copies from and to a GPU on streams of their own: the engine's kernels go on meanwhile. On the CPU nothing here does anything.

A call marks what its caller's stream has been given so far; copies wait for that, and the host for the copies, not for what the engine
has given its streams since.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

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
