"""Promises of child.py, with small Python modules for daemons."""

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.tools.child import Child
from kvstore.protocol.errors import Broken, ConfigError, DeadlineExceeded

SERVES = """
import json, signal, sys, time
print("no JSON", flush=True)
print(json.dumps([1]), flush=True)
print(json.dumps({"event": "serving", "listen": "here"}), flush=True)
print("a line of the log", file=sys.stderr, flush=True)
print(json.dumps({"ready": True, "arguments": sys.argv[1:]}), flush=True)
time.sleep(60)
"""
SAVES = """
import json, signal, sys, time
def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print(json.dumps({"event": "saving"}), flush=True)
    time.sleep(0.3)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(json.dumps({"event": "ready", "stop_s": 120}), flush=True)
while True: time.sleep(1)
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVES
REFUSES = "import sys\nprint('a warning', file=sys.stderr)\nprint('kvstore-node: error: no such disk', file=sys.stderr)\nsys.exit(2)"
CRASHES = "raise RuntimeError('what happened')"
SILENT = "import time\ntime.sleep(60)"


class Starter:
    """Starts daemons from source text, and keeps what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self.children: list[Child] = []

    def start(self, source: str, *arguments: str) -> Child:
        (self.folder / "daemon.py").write_text(source)
        child = Child(
            "node-0",
            "daemon",
            arguments,
            environment={**os.environ, "PYTHONPATH": str(self.folder)},
            on_log=lambda name, line: self.log.put((name, line)),
            on_end=self.ended.put,
        )
        self.children.append(child)
        return child


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for child in starter.children:
        child.kill()


def test_child_reports_events_and_forwards_log(starter: Starter) -> None:
    child = starter.start(SERVES, "--name=node-0")
    assert child.facts("serving", deadline_s=120)["listen"] == "here"
    assert child.facts("ready", deadline_s=120)["arguments"] == ["--name=node-0"]
    assert starter.log.get(timeout=120) == ("node-0", "a line of the log")
    os.kill(child.pid, 0)


def test_stop_asks_and_the_end_is_told(starter: Starter) -> None:
    child = starter.start(SERVES)
    child.facts("ready", deadline_s=120)
    assert child.stop()
    assert starter.ended.get(timeout=120) is child
    assert str(child.failure()) == f"node-0 (pid {child.pid}) was killed by SIGTERM"


def test_child_gets_one_sigterm_and_its_announced_time(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cli.tools.child.STOP_DEADLINE_S", 0.0)
    child = starter.start(SAVES)
    child.facts("ready", deadline_s=120)
    child.terminate()
    child.facts("saving", deadline_s=120)
    assert child.stop()
    assert child._process.wait() == 0, "a second signal ends it at once"


def test_one_that_does_not_stop_in_time_is_killed(starter: Starter) -> None:
    child = starter.start(STUBBORN)
    child.facts("ready", deadline_s=120)
    assert not child.stop(deadline_s=0.01)
    assert "was killed by SIGKILL" in str(child.failure())


def test_child_config_error_has_its_message_once(starter: Starter) -> None:
    child = starter.start(REFUSES)
    with pytest.raises(ConfigError, match=r"^node-0: no such disk$"):
        child.facts("ready", deadline_s=120)
    child.stop()
    assert starter.log.get(timeout=120) == ("node-0", "a warning")
    assert starter.log.empty()


def test_a_crash_is_told_by_its_status_and_last_line(starter: Starter) -> None:
    child = starter.start(CRASHES)
    with pytest.raises(Broken, match="exited with status 1: RuntimeError: what happened"):
        child.facts("ready", deadline_s=120)
    child.stop()


def test_a_kill_from_elsewhere_is_told_by_its_signal(starter: Starter) -> None:
    child = starter.start(SERVES)
    child.facts("ready", deadline_s=120)
    os.kill(child.pid, signal.SIGKILL)
    assert "was killed by SIGKILL" in str(starter.ended.get(timeout=120).failure())
    child.stop()


def test_one_that_says_nothing_is_waited_for_until_the_deadline(starter: Starter) -> None:
    child = starter.start(SILENT)
    with pytest.raises(DeadlineExceeded, match=r"node-0 is not ready after 0\.01 s"):
        child.facts("ready", deadline_s=0.01)
    child.kill()
