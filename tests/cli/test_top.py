"""Promises of top.py: on a terminal that a pty is, and piped."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

import pyte
from click.testing import CliRunner

from kvstore.cli.command_group import ERROR_STATUS
from kvstore.cli.main import kvstore
from kvstore.protocol import control_pb2 as pb
from tests.client.stub_control import stub_controls
from tests.ports import free_ports
from tests.rpc.stub_masters import stub_masters

WAIT_S = 60.0


class Terminal:
    """`kvstore top` on a terminal of its own, and what can be read there."""

    def __init__(self, *arguments: str, columns: int = 100, lines: int = 30) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        own, its = pty.openpty()
        self._resize(own, columns, lines)
        command = [sys.executable, "-m", "kvstore.cli.main", "top", *arguments]
        self._process = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, start_new_session=True, env={**os.environ, "TERM": "xterm"}
        )
        os.close(its)
        self._own = own

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        os.close(self._own)

    def await_text(self, text: str) -> list[str]:
        """The lines once one of them has `text`."""
        until_s = time.monotonic() + WAIT_S
        while not any(text in line for line in self._screen.display):
            left_s = until_s - time.monotonic()
            assert left_s > 0, f"{text!r} does not come: {self._screen.display}"
            self._read(left_s)
        return list(self._screen.display)

    def press(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        self._screen.reset()
        self._resize(self._own, columns, lines)
        os.killpg(self._process.pid, signal.SIGWINCH)

    def await_end(self) -> int:
        while self._process.poll() is None and self._read(WAIT_S):
            pass
        ended = self._process.wait(WAIT_S)
        while self._read(WAIT_S):  # the rest of the output, until the terminal is closed
            pass
        return ended

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._own], [], [], wait_s)[0]:
            return False
        try:
            some = os.read(self._own, 65536)
        except OSError:  # no process has the terminal open
            return False
        self.written += some
        self._stream.feed(some)
        return True

    @staticmethod
    def _resize(descriptor: int, columns: int, lines: int) -> None:
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def test_top_shows_sorts_resizes_and_quits(master: str) -> None:
    with Terminal("--master", master, "--interval-s", "0.1") as terminal:
        lines = terminal.await_text("1 to 1 of 1")
        assert "1 of 1 nodes alive" in lines[0]
        assert any("dram" in line for line in lines)
        assert any(line.startswith("node-0") and "alive" in line for line in lines)
        terminal.press(b"s")
        terminal.await_text("sort: state")
        terminal.resize(40, 12)
        assert all(len(line.rstrip()) <= 40 for line in terminal.await_text("1 to 1 of 1"))
        terminal.resize(160, 40)
        assert any("address" in line for line in terminal.await_text("address"))
        terminal.press(b"q")
        assert terminal.await_end() == 0
    assert b"\x1b[?1049h" in terminal.written, "on a screen of its own,"
    assert b"\x1b[?1049l" in terminal.written, "which is left"
    assert b"\x1b[2J" not in terminal.written.partition(b"node-0")[2], "and not cleared between looks: it would flicker"


def test_it_ends_after_so_many_looks(master: str) -> None:
    with Terminal("--master", master, "--interval-s", "0.05", "--count", "2") as terminal:
        assert terminal.await_end() == 0


def test_top_shows_unreachable_cluster_and_retries(master: str) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with Terminal("--master", nobody, "--deadline-s", "0.3", "--interval-s", "0.05") as terminal:
        terminal.await_text(nobody)
        terminal.press(b"q")
        assert terminal.await_end() == ERROR_STATUS
    assert terminal.written.rpartition(b"\x1b[?1049l")[2].startswith(b"kvstore: error: no master can be reached")


def test_piped_it_prints_a_look_after_the_other(master: str) -> None:
    def output(*arguments: str) -> str:
        looks = ["top", "--count", "2", "--interval-s", "0.05", "--master", master]
        result = CliRunner().invoke(kvstore, [*looks, *arguments], catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    assert [json.loads(look)["catalog"] for look in output("--json").splitlines()] == ["memory:", "memory:"]
    shown = output()
    assert shown.count("1 of 1 alive") == 2
    assert "nvme" in shown


def test_piped_top_goes_on_over_a_failover() -> None:
    said = [pb.StatusReply(role="following"), *[pb.StatusReply(role="owner", catalog="memory:")] * 2]
    with stub_controls(said[-1]) as (control,), stub_masters(1) as (master,):
        master.control = control.place
        arguments = ["top", "--json", "--count", "4", "--interval-s", "0.05", "--master", master.address]
        control.says_status = lambda: said.pop(0) if len(said) > 1 else pb.StatusReply(role="owner", catalog="memory:")
        told = CliRunner().invoke(kvstore, arguments)
        assert told.exit_code == ERROR_STATUS, "no master had answered before"
        said.insert(1, pb.StatusReply(role="following"))
        told = CliRunner().invoke(kvstore, arguments)
    assert (told.exit_code, len(told.stdout.splitlines())) == (0, 3)
    assert told.stderr == "the master does not answer: the owner is looked for\n"
