"""A system that gives no thread any more, as at the limit of a container's processes."""

import _thread
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest


def no_more_threads(monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """From now on, or once so many more have been started."""
    started = count()

    def refused(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*arguments: Any) -> Any:
            if next(started) >= after:
                raise RuntimeError("can't start new thread")
            return start(*arguments)

        return begin

    monkeypatch.setattr(threading.Thread, "start", refused(threading.Thread.start))
    monkeypatch.setattr(_thread, "start_new_thread", refused(_thread.start_new_thread))
