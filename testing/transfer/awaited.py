"""Waiting in the conformance suites: threads, conditions and time limits, and leaks of descriptors and threads."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, TypeVar

PATIENCE_S: Final = 60.0
"""Timeout of operations that succeed, for slow machines."""
SHORT_S: Final = 0.3
"""Deadline of operations that are to miss it."""
SOON_S: Final = 20.0
"""Slack of "soon" and "within the deadline": far below forever, far above what a busy machine needs."""
QUIET_S: Final = 0.1
"""A call that has not returned for this long counts as waiting."""
POLL_S: Final = 0.005
MAX_POLL_S: Final = 0.25
"""Poll interval of long waits, to save processor time."""

T = TypeVar("T")


def in_background(act: Callable[[], T]) -> "Future[T]":
    """Run `act` in a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def is_quiet(waiting: "Future[T]") -> bool:
    """Return True if `waiting` has no result after QUIET_S."""
    try:
        waiting.exception(QUIET_S)
    except TimeoutError:
        return True
    return False


@contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """Assert that the block takes at most this long, plus a slack, also if it raises."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        took_s = time.monotonic() - began_s
        assert took_s < timeout_s + SOON_S, f"took {took_s:.1f} s, not about {timeout_s:g} s"


def eventually(is_so: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds; fails with `what`. Polls ever more rarely, late by at most a twentieth."""
    began_s = time.monotonic()
    while not is_so():
        waited_s = time.monotonic() - began_s
        assert waited_s < PATIENCE_S, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(min(MAX_POLL_S, POLL_S + waited_s / 20))


def assert_nothing_is_left(act: Callable[[], None]) -> None:
    """Assert that ten calls of `act` leak no descriptor or thread."""

    def count(kind: str) -> int:
        return len(os.listdir(f"/proc/self/{kind}"))

    gc.collect()
    descriptors, threads = count("fd"), count("task")
    for _ in range(10):
        act()
    gc.collect()
    eventually(lambda: count("fd") <= descriptors, f"{descriptors} descriptors, there are {count('fd')}")
    eventually(lambda: count("task") <= threads, f"{threads} threads, there are {count('task')}")
