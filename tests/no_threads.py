"""A system that gives no thread any more, as at the limit of a container's processes."""

import threading
from itertools import count

import pytest


def no_more_threads(monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """From now on, or once so many more have been started."""
    start, started = threading.Thread.start, count()

    def refused(thread: threading.Thread) -> None:
        if next(started) >= after:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
