"""Forked workers run each test once and tell of it what one process would; what dies, fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.transfer.testing.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]


def run(folder: Path, text: str, *options: str, workers: int = 2) -> tuple[int, str]:
    """pytest's exit status and what it prints of this file of tests, with nothing of the checkout's but the plug-in."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    (folder / "test_it.py").write_text(f"import os, signal, time, warnings\nfrom pathlib import Path\nimport pytest\n{text}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.workers", f"--workers={workers}", *options]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.returncode, done.stdout + done.stderr


OUTCOMES = """
@pytest.fixture
def broken():
    raise ValueError("in a fixture")

@pytest.fixture
def breaking():
    yield
    raise ValueError("after the test")

def test_passes(): pass
def test_fails():
    print("printed", "by it")
    assert [1, 2] == [1, 3]
def test_errs(broken): pass
def test_errs_later(breaking): pass
@pytest.mark.skip(reason="not today")
def test_is_skipped(): pass
@pytest.mark.xfail(reason="known", strict=True)
def test_is_expected_to_fail(): assert False
def test_warns(): warnings.warn("softly", UserWarning)
"""


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_is_told_is_what_one_process_tells(tmp_path: Path, workers: int) -> None:
    status, told = run(tmp_path, OUTCOMES, "-rfEs", workers=workers)
    assert status == pytest.ExitCode.TESTS_FAILED
    for line in (
        "printed by it",
        "FAILED test_it.py::test_fails - assert [1, 2] == [1, 3]",
        "ERROR test_it.py::test_errs - ValueError: in a fixture",
        "ERROR test_it.py::test_errs_later - ValueError: after the test",
        "not today",
        "UserWarning: softly\n",
        "1 failed, 3 passed, 1 skipped, 1 xfailed, 1 warning, 2 errors in",
    ):
        assert told.count(line) == 1, (line, told)


def test_each_test_runs_once_with_files_of_its_own_and_what_it_does_not_print_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "ran").mkdir()
    text = f"""
@pytest.fixture(scope="module")
def started():
    with open({str(tmp_path / "started")!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")

@pytest.mark.parametrize("number", range(200))
def test_it(number, started, tmp_path, capfd):
    os.write(1, b"to the descriptor")
    assert capfd.readouterr().out == "to the descriptor"
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").touch()
    os.open(Path({str(tmp_path / "ran")!r}) / str(number), os.O_CREAT | os.O_EXCL)
"""
    status, told = run(tmp_path, text, workers=4)
    assert (status, len(list((tmp_path / "ran").iterdir()))) == (0, 200), told
    assert re.search(r"^200 passed in", told, re.MULTILINE)
    assert "to the descriptor" not in told
    started = (tmp_path / "started").read_text().split()
    assert len(set(started)) == len(started) == 4


def test_a_worker_without_tests_takes_those_of_another(tmp_path: Path) -> None:
    """The first of two has the first half; its first test waits for one of those after it, which only the second one can run: each is given
    a test ahead, so that one of the two may wait behind the first."""
    text = f"""
DONE = Path({str(tmp_path)!r})
@pytest.mark.parametrize("number", range(6))
def test_it(number):
    (DONE / f"done-{{number}}").touch()
    deadline = time.monotonic() + {PATIENCE_S / 2}
    while number == 0 and not any((DONE / f"done-{{other}}").exists() for other in (1, 2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""
    assert run(tmp_path, text)[0] == 0


@pytest.mark.parametrize(("end", "told"), [("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"), ("os._exit(0)", "status 0")])
def test_the_test_at_which_a_worker_dies_fails_and_the_others_run(tmp_path: Path, end: str, told: str) -> None:
    text = f"""
@pytest.mark.parametrize("number", range(8))
def test_it(number):
    if number == 1:
        {end}
"""
    for workers in (1, 2):
        status, printed = run(tmp_path, text, workers=workers)
        assert status == pytest.ExitCode.TESTS_FAILED
        assert f"a worker ended with {told} in this test" in printed
        assert "FAILED test_it.py::test_it[1]" in printed
        assert "1 failed, 7 passed in" in printed, printed
        assert "after its last test" not in printed, printed


@pytest.mark.parametrize("at_its_end", [1, 7])
def test_a_worker_that_dies_after_its_last_test_fails_the_run(tmp_path: Path, at_its_end: int) -> None:
    status, told = run(tmp_path, f"import atexit\n\ndef test_it(): atexit.register(os._exit, {at_its_end})\n", workers=1)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert f"a worker ended with status {at_its_end} after its last test" in told


def test_no_test_begins_after_as_many_failures_as_are_allowed(tmp_path: Path) -> None:
    text = """
@pytest.mark.parametrize("number", range(8))
def test_it(number): assert number != 2
"""
    status, told = run(tmp_path, text, "-x", workers=1)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in told
    assert re.search(r"^1 failed, [34] passed in", told, re.MULTILINE)  # the next one was given to it before


def test_files_that_cannot_be_collected_fail_the_run_and_none_of_its_tests_run(tmp_path: Path) -> None:
    status, told = run(tmp_path, "def test_it(): pass\nraise ValueError('while it is collected')\n")
    assert status == pytest.ExitCode.INTERRUPTED
    assert "while it is collected" in told


def test_an_interrupted_run_leaves_no_worker(tmp_path: Path) -> None:
    text = f"""
@pytest.fixture(scope="session", autouse=True)
def ended():
    yield
    Path({str(tmp_path / "ended")!r}).touch()

def test_it():
    os.kill(os.getppid(), signal.SIGINT)
"""
    status, told = run(tmp_path, text, workers=1)
    assert status == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in told
    assert (tmp_path / "ended").exists()
