"""Stacks of this process's threads, as text and as a sampled profile in folded form for flame graphs."""

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Final

INTERVAL_S: Final = 0.01
"""Sampling interval. A sample holds the interpreter for 20 us and more, by stack depth: under 1 % of one core."""
MAX_DEPTH: Final = 256


def stacks() -> str:
    """Name and stack of each thread, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"{names.get(ident, 'unknown')} ({ident}):\n{''.join(traceback.format_stack(frame, MAX_DEPTH))}")
    return "\n".join(parts)


def profile(seconds: float, *, sleep: Callable[[float], None] = time.sleep, clock_s: Callable[[], float] = time.monotonic) -> str:
    """Sample all other threads for `seconds`: a line `thread;outermost;...;innermost COUNT` per stack, most frequent
    first. Waiting threads count too; their innermost function shows it."""
    me, counts = threading.get_ident(), Counter[str]()
    until_s = clock_s() + seconds
    while clock_s() < until_s:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != me:
                counts[f"{names.get(ident, 'unknown')};{_folded(frame)}"] += 1
        sleep(INTERVAL_S)
    return "".join(f"{stack} {count}\n" for stack, count in counts.most_common())


def _folded(frame: FrameType | None) -> str:
    found: list[str] = []
    while frame is not None and len(found) < MAX_DEPTH:
        found.append(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return ";".join(reversed(found))
