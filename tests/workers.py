"""A pytest plug-in (`-p tests.workers --workers N`): tests are collected once, and run by N processes forked from the one that has.

Where each worker is a Python of its own, as pytest-xdist's are, each loads and collects all tests: 15 s of processor time or more, torch
and what Hypothesis reads of the sources among it. Here a worker is a fork, and pages that none writes are one. As there, each begins with a
share of the tests as they lie, so that what a file of tests sets up is set up once, and takes half of another's rest when it has none left;
a worker that dies fails the test that it was at, and another goes on with the rest.

A worker is a whole session of pytest from then on, with fixtures of the session, captured output and temporary files of its own, that
shows nothing: the process that collected is told of each report and prints what pytest always does.
"""

import contextlib
import os
import signal
import sys
import warnings
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import pytest

Report = pytest.TestReport | pytest.CollectReport
Told = list[tuple[Literal["report", "warning"], Any]]
"""What happened in a worker, in order."""

_SHARED: Final = pytest.StashKey[Path]()


def shared_folder(config: pytest.Config, own: Path) -> Path:
    """A folder for temporary files that all workers of this run have in common; `own`, the session's, where there are none."""
    return config.stash.get(_SHARED, own)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run tests in N processes forked after the tests were collected")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("workers"):
        config.pluginmanager.register(_Workers(config.getoption("workers")), "workers")


@dataclass(eq=False)
class _Seat:
    """One worker, as the process that collected knows it."""

    pid: int
    connection: Connection
    rest: deque[int]
    """Tests that it has yet to ask for, by their place in the session."""
    begun: deque[int] = field(default_factory=deque)
    """Given to it, and their last report has not come."""
    ends_with: pytest.ExitCode = pytest.ExitCode.OK
    has_all: bool = False
    """It was told that no test is left for it: it tells of its last one, and asks for none any more."""


class _Workers:
    """In the process that collected: who runs which test, and what is told of it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._forks = 0
        self._seats: list[_Seat] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Returns in each worker too, once no test is left for it; pytest goes on to end its session and process."""
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None  # as without workers
        count = min(self._count, len(session.items))
        bounds = [len(session.items) * worker // count for worker in range(count + 1)]
        try:
            for begin, end in pairwise(bounds):
                if self._fork(session, deque(range(begin, end))):
                    return True
            while self._seats:
                for connection in wait([seat.connection for seat in self._seats]):
                    seat = next(seat for seat in self._seats if seat.connection is connection)
                    if not self._answer(session, seat) and self._bury(session, seat):
                        return True
        finally:
            self._leave()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _fork(self, session: pytest.Session, rest: deque[int]) -> bool:
        """Whether this is the new worker, which has done all of its work when it returns."""
        base: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._forks += 1
        pid = os.fork()
        if pid:
            theirs.close()
            self._seats.append(_Seat(pid, ours, rest))
            return False
        ours.close()
        for seat in self._seats:
            seat.connection.close()
        self._seats.clear()
        worker = _Worker(session, theirs)
        _become_a_session(session.config, base, f"w{self._forks}")
        session.config.pluginmanager.register(worker, "worker")
        worker.run()
        return True

    def _answer(self, session: pytest.Session, seat: _Seat) -> bool:
        """Take what a worker tells and give it the next test; False: it has ended."""
        try:
            told: Told = seat.connection.recv()
        except (EOFError, ConnectionError):
            return False
        for kind, data in told:
            if kind == "warning":
                _warn(session, *data)
            else:
                report = session.config.hook.pytest_report_from_serializable(config=session.config, data=data)
                if report.when == "setup":
                    session.ihook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
                session.ihook.pytest_runtest_logreport(report=report)
                if report.failed:
                    seat.ends_with = pytest.ExitCode.TESTS_FAILED
                if report.when == "teardown":
                    seat.begun.popleft()
                    session.ihook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        at = None if session.shouldfail or session.shouldstop or seat.has_all else self._next(seat)
        if at is not None:
            seat.begun.append(at)
        seat.has_all = at is None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, as the next look at it shows
            seat.connection.send(at)
        return True

    def _next(self, seat: _Seat) -> int | None:
        if not seat.rest:
            longest = max(self._seats, key=lambda other: len(other.rest)).rest
            seat.rest.extendleft(longest.pop() for _ in range((len(longest) + 1) // 2))
        return seat.rest.popleft() if seat.rest else None

    def _bury(self, session: pytest.Session, seat: _Seat) -> bool:
        """Whether this is the worker that goes on in the place of one that died at a test."""
        self._seats.remove(seat)
        seat.connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(seat.pid, 0)[1])
        ended = f"a worker ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
        if not seat.begun:
            if status != seat.ends_with and not session.shouldfail:
                session.shouldfail = f"{ended} after its last test"
            return False
        item = session.items[seat.begun.popleft()]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", f"{ended} in this test", "call")
        session.ihook.pytest_runtest_logreport(report=report)
        session.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        rest = seat.begun + seat.rest
        return bool(rest) and not session.shouldfail and self._fork(session, rest)

    def _leave(self) -> None:
        """Where all went well none is left; else they end with the tests that they are at."""
        for seat in self._seats:
            seat.connection.close()
        for seat in self._seats:
            os.waitpid(seat.pid, 0)
        self._seats.clear()


class _Worker:
    """In a worker: it asks for tests, one ahead, for what comes next says which fixtures stay."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._session = session
        self._connection = connection
        self._told: Told = []

    def run(self) -> None:
        self._told.clear()  # what was before the fork, of which pytest tells each new plug-in
        self._session.testsfailed = 0
        items = self._session.items
        at = self._ask()
        while at is not None:
            following = self._ask()
            self._session.config.hook.pytest_runtest_protocol(item=items[at], nextitem=None if following is None else items[following])
            at = following
        self._ask()

    def _ask(self) -> int | None:
        """Tell what happened, and hear which test comes next: None also when nobody hears any more."""
        told, self._told = self._told, []
        try:
            self._connection.send(told)
            at: int | None = self._connection.recv()
        except (EOFError, ConnectionError):
            return None
        return at

    def pytest_runtest_logreport(self, report: Report) -> None:
        data = self._session.config.hook.pytest_report_to_serializable(config=self._session.config, report=report)
        self._told.append(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self._told.append(("warning", (text, warning_message.filename, warning_message.lineno, when, nodeid, location)))


def _become_a_session(config: pytest.Config, base: Path, name: str) -> None:
    """Have for itself what sessions share with nobody, and a fork with its parent: terminal, files of captured output, temporary files."""
    manager = config.pluginmanager
    manager.unregister(name="workers")
    terminal: Any = manager.unregister(name="terminalreporter")
    terminal._show_progress_info = False
    # pytest-timeout prints stacks there.
    manager.register(SimpleNamespace(_tw=terminal._tw), "terminalreporter")
    capture: Any = manager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.stash[_SHARED] = base
    config.option.basetemp = base / name
    tmpdir: Any = manager.get_plugin("tmpdir")
    tmpdir.pytest_configure(config)


def _warn(
    session: pytest.Session, text: str, filename: str, lineno: int, when: str, nodeid: str, location: tuple[str, int, str] | None
) -> None:
    message = warnings.WarningMessage(text, Warning, filename, lineno)
    session.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
    )
