"""Devices that fail under a process that runs: the kernel's answers to its writes to one file are replaced while strace holds it.

So LMDB's own code meets the error, at the system call where a disk would give it. Needs strace, and leave to trace (Debian: strace; root).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

WRITES: Final = "write,pwrite64,writev,pwritev,pwritev2,fallocate"
SYNCS: Final = "fsync,fdatasync"
ATTACH_S: Final = 60.0
POLL_S: Final = 0.005


@cache
def why_not() -> str:
    """Why devices cannot be made to fail here and what would help; "" when they can."""
    if shutil.which("strace") is None:
        return "strace is not on PATH (Debian: apt-get install strace)"
    done = subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], capture_output=True, text=True, timeout=ATTACH_S, check=False)
    return f"this machine does not let processes be traced: {done.stderr.strip()}" if done.returncode else ""


@contextlib.contextmanager
def refusing_writes(pid: int, file: Path, error: str, *, when: str = "1+", calls: str = WRITES) -> Iterator[None]:
    """Writes of the process to the file fail with `error` (ENOSPC, EIO): those that `when` says ("3": the third, "3+": all from the
    third), counted from now on, by each of the system calls and in each thread."""
    with _traced(pid, file, f"inject={calls}:error={error}:when={when}"):
        yield


@contextlib.contextmanager
def slow_syncs(pid: int, file: Path | None, delay_s: float) -> Iterator[None]:
    """Delay every sync of `file` by the process by `delay_s`; None: of every file."""
    with _traced(pid, file, f"inject={SYNCS}:delay_enter={int(delay_s * 1e6)}"):
        yield


@contextlib.contextmanager
def _traced(pid: int, file: Path | None, inject: str) -> Iterator[None]:
    """Every thread of it, those to come included. A process that ends meanwhile is left alone."""
    where = [] if file is None else ["-P", str(file.resolve())]
    command = ["strace", "-f", "-qq", "-o", os.devnull, *where, "-e", f"trace={WRITES},{SYNCS}", "-e", inject, "-p", str(pid)]
    # The output goes to a file. A strace that is killed during its start leaves a stopped test process, which would keep a pipe open for
    # good. For the same reason strace has its own process group.
    with tempfile.TemporaryFile() as said, subprocess.Popen(command, stderr=said, process_group=0) as tracer:
        try:
            end_s = time.monotonic() + ATTACH_S
            while not _is_traced(pid, tracer.pid) and tracer.poll() is None and not _has_ended(pid):
                assert time.monotonic() < end_s, f"strace does not trace {pid} after {ATTACH_S:g} s"
                time.sleep(POLL_S)
            if tracer.poll() is not None and not _has_ended(pid):
                said.seek(0)
                raise AssertionError(f"strace has ended: {said.read().decode(errors='replace')}")
            yield
        finally:
            _end(tracer, pid)


def _end(tracer: subprocess.Popen[bytes], pid: int) -> None:
    """Detach strace from the process. After the end of the process strace exits without a signal."""
    if not _has_ended(pid):
        tracer.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        tracer.wait(ATTACH_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(tracer.pid, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    """Return whether or not its end has been taken note of."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def _is_traced(pid: int, tracer: int) -> bool:
    """Each of its threads is."""
    with contextlib.suppress(OSError):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return all(f"TracerPid:\t{tracer}\n" in (task / "status").read_text() for task in tasks)
    return False
