"""Promises of daemon.py, in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

PROGRAM = """
import os
from kvstore.rpc.daemon import begin_logging, on_sighup, announce, serve, stop_on_signals
from kvstore.rpc.reactor import Reactor
begin_logging()
reactor = Reactor()
reactor.every(0.1, lambda: None)  # as daemons have: Python hears of a signal that strikes just before the wait when that ends
stop_on_signals(reactor ASK)
announce("ready", {"pid": os.getpid()})
serve(reactor)
reactor.close()
announce("over", {})
"""

SAYING_ONE_IN_THE_LOOP = ')\nreactor.call_soon(lambda: announce("within", {}))\nreactor.call_soon(reactor.stop'


def start(ask_to_end: str = "") -> "subprocess.Popen[str]":
    program = PROGRAM.replace(" ASK", ask_to_end)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_every_line_is_json(number: signal.Signals) -> None:
    process = start()
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"event": "ready", "pid": process.pid}
    process.send_signal(number)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out), errors) == (0, {"event": "over"}, "")


def test_stop_on_signals_ends_at_second_signal_at_the_latest() -> None:
    process = start(', lambda: announce("asked", {})')
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert json.loads(process.stdout.readline()) == {"event": "asked"}
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out), errors) == (0, {"event": "over"}, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_end_on_signals_reports_the_names_without_a_reactor(number: signal.Signals) -> None:
    program = """
import threading
from kvstore.rpc.daemon import end_on_signals, announce
ended = threading.Event()
came = end_on_signals(ended.set)
announce("ready", {})
ended.wait()
announce("over", {"came": came})
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out)) == (0, {"event": "over", "came": [number.name]})


@pytest.mark.promise("authentication")
@pytest.mark.parametrize(("act", "said"), [("None", []), ('lambda: reactor.call_soon(lambda: announce("hung up", {}))', ["hung up"])])
def test_a_terminal_that_hangs_up_ends_nothing(act: str, said: list[str]) -> None:
    process = start(f")\non_sighup({act}")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    assert [json.loads(process.stdout.readline())["event"] for _ in said] == said
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out), errors) == (0, {"event": "over"}, "")


GROWING = """
import ctypes
from array import array
from kvstore.rpc.daemon import MAPPED_BYTES, map_large_arrays
PREPARE
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
bytes(8 * MAPPED_BYTES)  # freed at once: malloc takes this for the size that is to be in the heap from now on
before = mallinfo().hblks
grown = [array("Q", bytes(MAPPED_BYTES)) for _ in range(3)]
print(mallinfo().hblks - before)
"""


@pytest.mark.parametrize(("prepare", "mapped"), [("", 0), ("map_large_arrays()", 3)])
def test_large_arrays_are_mapped_whatever_was_freed_before(prepare: str, mapped: int) -> None:
    program = GROWING.replace("PREPARE", prepare)
    out = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    assert int(out) == mapped


def test_a_starter_that_no_longer_listens_is_no_reason_to_stop() -> None:
    process = start()
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    with process.stderr as errors:
        assert "further events are not printed: Broken pipe" in errors.read()


def dead_terminal() -> int:
    master, terminal = os.openpty()
    os.close(master)
    return terminal


@pytest.mark.parametrize(
    ("opened", "why"),
    [(lambda: os.open("/dev/full", os.O_WRONLY), "No space left on device"), (dead_terminal, "Input/output error")],
    ids=["full disk", "dead terminal"],
)
def test_unwritable_stdout_is_logged_once_and_not_fatal(opened: Callable[[], int], why: str) -> None:
    program = PROGRAM.replace(" ASK", SAYING_ONE_IN_THE_LOOP)
    with open(opened(), "wb") as output:
        process = subprocess.run([sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.endswith(f"further events are not printed: {why}")


def test_daemon_without_stdout_announces_nothing_and_runs() -> None:
    program = PROGRAM.replace(" ASK", SAYING_ONE_IN_THE_LOOP)
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", program]
    process = subprocess.run(closing, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_a_line_is_one_write_so_that_daemons_can_share_a_file(environment: dict[str, str]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a packet a write
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.replace(" ASK", "")], stdout=theirs.fileno(), env={**os.environ, **environment}
            )
        ours.settimeout(120)
        ready = ours.recv(1000)
        process.send_signal(signal.SIGTERM)
        over = ours.recv(1000)
        assert process.wait(120) == 0
    assert [json.loads(line)["event"] for line in (ready, over)] == ["ready", "over"]
    assert ready.endswith(b"}\n")
    assert over.endswith(b"}\n")
