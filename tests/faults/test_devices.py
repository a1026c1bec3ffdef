"""A process's writes to one file fail, or take longer, while it is told so, and no others."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.transfer.testing.waiting import eventually
from tests.faults import devices

WRITER = """
import os, sys, time
fds = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in sys.argv[1:]]
for line in sys.stdin:
    said = []
    for fd in fds:
        began_s = time.monotonic()
        try:
            os.pwrite(fd, b"content", 0)
            os.fdatasync(fd)
        except OSError as error:
            said.append(os.strerror(error.errno))
        else:
            said.append("slow" if time.monotonic() - began_s >= 0.5 else "ok")
    print(*said, sep=", ", flush=True)
"""

pytestmark = pytest.mark.skipif(bool(devices.why_not()), reason=devices.why_not() or "-")


class Writer:
    def __init__(self, *files: Path) -> None:
        command = [sys.executable, "-c", WRITER, *map(str, files)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    started = Writer(tmp_path / "one", tmp_path / "other")
    yield started
    with started.process as process:
        process.kill()


def test_writes_to_one_file_fail_from_the_one_that_is_named_until_the_end(writer: Writer, tmp_path: Path) -> None:
    assert "No space" not in writer.write()
    with devices.refusing_writes(writer.process.pid, tmp_path / "one", "ENOSPC", when="2+"):
        assert not writer.write().startswith("No space")
        assert writer.write().startswith("No space left on device, ")
        assert "No space" not in writer.write().split(", ")[1]
    assert "No space" not in writer.write()


def test_one_write_fails(writer: Writer, tmp_path: Path) -> None:
    writer.write()
    with devices.refusing_writes(writer.process.pid, tmp_path / "other", "EIO", when="2"):
        assert [writer.write().split(", ")[1] == "Input/output error" for _ in range(3)] == [False, True, False]


def test_what_is_synced_takes_longer(writer: Writer, tmp_path: Path) -> None:
    writer.write()
    with devices.slow_syncs(writer.process.pid, tmp_path / "one", 0.5):
        assert writer.write().startswith("slow, ")


def test_a_process_that_ends_meanwhile_is_left_alone(writer: Writer, tmp_path: Path) -> None:
    writer.write()
    with devices.slow_syncs(writer.process.pid, None, 0.5):
        writer.process.kill()
        writer.process.wait()
    for _ in range(20):  # some of them would be interrupted before they can take it
        with devices.slow_syncs(writer.process.pid, None, 0.5):
            assert not os.path.exists(f"/proc/{writer.process.pid}")
    eventually(lambda: is_let_go(writer.process.pid), "no strace is left")


def test_one_that_has_ended_and_was_not_waited_for_is_left_alone_too(writer: Writer) -> None:
    writer.write()
    writer.process.kill()
    os.waitid(os.P_PID, writer.process.pid, os.WEXITED | os.WNOWAIT)
    with devices.slow_syncs(writer.process.pid, None, 0.5):
        assert os.path.exists(f"/proc/{writer.process.pid}")
    eventually(lambda: is_let_go(writer.process.pid), "no strace is left")


def test_one_that_another_strace_holds_cannot_be_traced_and_it_is_told_why(writer: Writer) -> None:
    writer.write()
    with devices.slow_syncs(writer.process.pid, None, 0.5):
        with pytest.raises(AssertionError, match="Operation not permitted"), devices.slow_syncs(writer.process.pid, None, 0.5):
            pass
        assert writer.write() == "slow, slow"


def is_let_go(pid: int) -> bool:
    """No strace of it is left, nor what one has forked."""
    left = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            left.append(entry.read_bytes().endswith(b"\0-p\0%d\0" % pid))
    return not any(left)
