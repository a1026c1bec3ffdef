"""Promises of stacks.py."""

import threading
from collections.abc import Iterator

import pytest

from kvstore.telemetry import stacks as module
from kvstore.telemetry.stacks import profile, stacks


def waits_here(entered: threading.Event, end: threading.Event) -> None:
    entered.set()
    end.wait()


@pytest.fixture
def waiting() -> Iterator[None]:
    """A thread called `idler` in `waits_here`."""
    entered, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits_here, args=(entered, end), name="idler")
    thread.start()
    assert entered.wait(60)
    yield
    end.set()
    thread.join()


@pytest.mark.usefixtures("waiting")
def test_every_thread_is_shown_with_its_name_and_place() -> None:
    text = stacks()
    assert "idler (" in text
    assert "in waits_here" in text
    assert "MainThread (" in text


@pytest.mark.usefixtures("waiting")
def test_a_profile_counts_stacks_of_the_other_threads() -> None:
    times = iter([0.0, 0.0, 0.5, 1.0])
    lines = profile(1.0, sleep=lambda _s: None, clock_s=lambda: next(times)).splitlines()
    (line,) = [line for line in lines if line.startswith("idler;")]
    stack, _, count = line.rpartition(" ")
    assert count == "2"
    assert "test_stacks.waits_here" in stack
    assert not any(line.startswith("MainThread;") for line in lines)


@pytest.mark.usefixtures("waiting")
def test_deep_stacks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DEPTH", 1)
    times = iter([0.0, 0.0, 1.0])
    lines = profile(1.0, sleep=lambda _s: None, clock_s=lambda: next(times)).splitlines()
    (line,) = [line for line in lines if line.startswith("idler;")]
    assert line.count(";") == 1
