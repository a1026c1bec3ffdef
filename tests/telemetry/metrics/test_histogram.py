"""Promises of histogram.py."""

import dis
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import pytest

from kvstore.telemetry.metrics import histogram as module
from kvstore.telemetry.metrics.histogram import Histogram, HistogramSnapshot

LOOKS_FOR_SIGNALS: Final = {"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}
"""Instructions of CPython after which handlers of signals are run."""


class Struck(Exception):
    """Raised by a signal handler."""


def struck(call: Callable[[], object], code: Any, strike: int) -> bool:
    """Make the call, as if a signal whose handler raises came in this code at the moment of this number. Was there such a moment?"""
    names = {instruction.offset: instruction.opname for instruction in dis.get_instructions(code, show_caches=True)}
    moments, before = 0, ""

    def trace(frame: FrameType, kind: str, _argument: Any) -> Any:
        nonlocal moments, before
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if kind == "opcode":
            moments += before in LOOKS_FOR_SIGNALS
            is_now = before in LOOKS_FOR_SIGNALS and moments == strike
            before = names[frame.f_lasti]
            if is_now:
                raise Struck
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Struck:
        return True
    finally:
        sys.settrace(former)
    return False


def test_measurement_goes_to_its_bucket() -> None:
    histogram = Histogram((0.001, 0.01))
    for elapsed_ns in (0, 1_000_000, 1_000_001, 10_000_000, 10_000_001):
        histogram.record(elapsed_ns)
    assert histogram.counts() == HistogramSnapshot((0.001, 0.01), (2, 2, 1), 0.022000002)


def test_log_is_bounded_and_counts_like_observe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOGGED", 7)
    rng = random.Random(2)
    recorded, observed, most = Histogram(), Histogram(), 0
    for _ in range(300):
        elapsed_ns = int(10 ** rng.uniform(2, 11))
        recorded.record(elapsed_ns)
        observed.observe(elapsed_ns, 1)
        most = max(most, elapsed_ns)
        assert len(recorded.log) < 7
    assert recorded.counts() == observed.counts()
    assert recorded.slowest_ns() == most


def test_the_slowest_is_forgotten_and_the_counts_are_not() -> None:
    histogram = Histogram()
    histogram.record(9)
    histogram.forget_slowest()
    assert histogram.slowest_ns() == 0
    histogram.record(4)
    histogram.record(3)
    assert histogram.slowest_ns() == 4
    assert sum(histogram.counts().counts) == 3


def test_concurrent_measurements_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOGGED", 5)
    histogram = Histogram()

    def record() -> None:
        for _ in range(20_000):
            histogram.record(1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        histogram.counts()
    for thread in threads:
        thread.join()
    assert sum(histogram.counts().counts) == 80_000


def test_log_is_folded_after_an_interrupted_call() -> None:
    strike = 1
    while True:
        histogram = Histogram()
        histogram.log += [1, 2, 3]
        if not struck(histogram.fold, Histogram.fold.__code__, strike):
            break
        histogram.log.append(4)
        histogram.fold()
        assert histogram.log == [], f"after the moment {strike} nothing was counted any more"
        strike += 1
    assert strike > 10
