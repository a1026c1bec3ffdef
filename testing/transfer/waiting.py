"""How the conformance suites wait: threads, conditions and time limits, and what may be left when all is closed."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, TypeVar

PATIENCE_S: Final = 60.0
"""For what succeeds, however slow the machine is."""
SHORT_S: Final = 0.3
"""The deadline of what is to miss it."""
SOON_S: Final = 20.0
"""Slack of "soon" and "within the deadline": far less than forever, far more than a busy machine needs."""
QUIET_S: Final = 0.1
"""A call that has not returned for this long is taken to be waiting."""
POLL_S: Final = 0.005
MAX_POLL_S: Final = 0.05
"""Of what takes long: to ask two hundred times a second costs the processor that it waits for."""

T = TypeVar("T")


def in_background(act: Callable[[], T]) -> "Future[T]":
    """Run it in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def is_quiet(waiting: "Future[T]") -> bool:
    """Whether it has not returned after a while; a thread that was to wait does so by now."""
    try:
        waiting.exception(QUIET_S)
    except TimeoutError:
        return True
    return False


@contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """Fails unless what it surrounds takes at most this long, and a slack; also when that raises."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        took_s = time.monotonic() - began_s
        assert took_s < timeout_s + SOON_S, f"took {took_s:.1f} s, not about {timeout_s:g} s"


def eventually(is_so: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds; fails, naming what was awaited. Asks less and less often, to be late by a twentieth at most."""
    began_s = time.monotonic()
    while not is_so():
        waited_s = time.monotonic() - began_s
        assert waited_s < PATIENCE_S, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(min(MAX_POLL_S, POLL_S + waited_s / 20))


def assert_nothing_is_left(act: Callable[[], None]) -> None:
    """Ten times `act` leave as many descriptors and threads as there were."""

    def count(kind: str) -> int:
        return len(os.listdir(f"/proc/self/{kind}"))

    gc.collect()
    descriptors, threads = count("fd"), count("task")
    for _ in range(10):
        act()
    gc.collect()
    eventually(lambda: count("fd") <= descriptors, f"{descriptors} descriptors, there are {count('fd')}")
    eventually(lambda: count("task") <= threads, f"{threads} threads, there are {count('task')}")
