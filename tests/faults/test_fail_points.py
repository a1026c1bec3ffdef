"""Fail points strike where they are named, as often as they are told to, and leave every function as it was."""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.transfer.testing.waiting import PATIENCE_S, eventually
from tests.faults.fail_points import ENVIRONMENT, Controlled, FailPoints, Point, watch
from tests.faults.points import POINTS, of

STEP = Point("tests.faults.test_fail_points:Stepping.step", where=lambda _self, number: number > 0)
DONE = Point("tests.faults.test_fail_points:Stepping.step", is_after=True)
HERE = {"step": STEP, "done": DONE}


class Stepping:
    def __init__(self) -> None:
        self.done: list[int] = []

    def step(self, number: int) -> int:
        self.done.append(number)
        return number

    def steps(self) -> Iterator[int]:
        yield 0


@pytest.fixture
def armed() -> Iterator[tuple[FailPoints, list[str]]]:
    struck: list[str] = []
    points = FailPoints(HERE, on_strike=struck.append)
    yield points, struck
    points.disarm()


@pytest.mark.parametrize("name", POINTS)
def test_every_point_names_a_function_of_the_product(name: str) -> None:
    owner, attribute = POINTS[name].owner()
    assert owner.__module__.startswith("kvstore.")
    assert callable(getattr(owner, attribute))


def test_points_have_a_role_and_an_operation() -> None:
    assert of("node", "put", "get")
    assert {name.split(".")[0] for name in POINTS} == {"node", "master", "client"}
    assert set(of("node", "drain")) < set(of("node"))


def test_what_is_armed_is_wrapped_and_what_is_disarmed_is_what_it_was(armed: tuple[FailPoints, list[str]]) -> None:
    points, struck = armed
    original = inspect.getattr_static(Stepping, "step")
    began_s = time.monotonic()
    points.arm("step=delay:0.01,done=delay:0")
    assert Stepping().step(1) == 1
    assert Stepping().step(0) == 0
    assert time.monotonic() - began_s >= 0.01
    assert struck == ["step", "done", "done"], "the first one only where its condition holds"
    points.arm("")
    assert inspect.getattr_static(Stepping, "step") is original


@pytest.mark.parametrize(("text", "error"), [("nothing=kill", KeyError), ("step=burn", ValueError), ("step", ValueError)])
def test_what_cannot_be_armed_is_refused_and_arms_nothing(armed: tuple[FailPoints, list[str]], text: str, error: type[Exception]) -> None:
    original = inspect.getattr_static(Stepping, "step")
    with pytest.raises(error):
        armed[0].arm(f"done=delay:0,{text}")
    assert inspect.getattr_static(Stepping, "step") is original


@pytest.mark.parametrize("target", ["tests.faults.test_fail_points:Stepping.nowhere", "tests.faults.test_fail_points:Stepping.steps"])
def test_a_point_that_is_no_function_of_its_class_is_refused(target: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        Point(target).owner()


def test_a_process_takes_what_its_file_says_while_it_runs_and_dies_at_the_passage_that_is_named(tmp_path: Path) -> None:
    controlled = Controlled(tmp_path / "points")
    controlled.arm("step=delay:0")
    script = (
        "from tests.faults.fail_points import watch; from tests.faults.test_fail_points import HERE, Stepping\n"
        "watch(HERE)\n"
        "stepping = Stepping()\n"
        "print(stepping.step(1), flush=True)\n"
        "while input(): print(stepping.step(1), flush=True)\n"
    )
    environment = {**os.environ, **controlled.environment}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        assert controlled.is_armed
        assert controlled.struck == ["step"], "armed before the first step"
        controlled.disarm()
        eventually(lambda: controlled.is_armed, "the process has taken note")
        controlled.arm("done=kill:2")
        eventually(lambda: controlled.is_armed, "the process has taken note")
        process.stdin.write("go on\n" * 3)
        process.stdin.flush()
        assert process.stdout.readline() == "1\n"
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert process.stdout.read() == "", "it was called, and never returned"
        assert controlled.struck == ["done"]


def test_a_process_that_is_told_of_no_file_watches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    threads = threading.active_count()
    watch(HERE)
    assert threading.active_count() == threads
