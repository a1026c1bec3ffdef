"""Promises of up.py: as a process of its own that starts its daemons as programs, except for what it refuses and what it does not tell."""

import io
import json
import os
import signal
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.progress import Progress

from kvstore.cli import up as cli_up
from kvstore.cli.main import kvstore
from kvstore.cli.tools.child import OnLog
from kvstore.cli.tools.cluster import ClusterPlan, LocalCluster
from kvstore.cli.up import print_log
from kvstore.client import Client
from tests.forked import COMMAND, Forked
from tests.ports import free_ports


class Up:
    """`kvstore up`: its lines are read as they come. A context manager, so that a failing test leaves nothing behind."""

    def __init__(self, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = Forked(COMMAND, ["up", "--dram", "4MiB", *arguments], environment=os.environ, stderr=self._errors)

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def facts(self) -> dict[str, Any]:
        line = self.line()
        assert line, self.end()
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> tuple[int, str, str]:
        """Wait for it: status, the rest of standard output, standard error."""
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        status = self.process.wait(120)
        self._errors.seek(0)
        return status, rest, self._errors.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_clients_until_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_ports(2)[0]}"
    places = ["--listen", listen, "--nvme", f"{tmp_path}:8MiB", "--catalog", f"lmdb:{tmp_path / 'catalog'}"]
    with Up("--json", *places) as up:
        serving, ready, warm = up.facts(), up.facts(), up.facts()
        assert (serving["event"], ready["event"], warm["event"], ready["master"]) == ("serving", "ready", "warm", listen)
        with Client(listen) as client:
            assert client.put(b"key", b"value")
            assert client.get(b"key") == b"value"
        up.process.send_signal(number)
        status, rest, errors = up.end()
    assert (status, rest) == (0, "")
    assert errors.endswith("stopped\n")
    assert "node-0 | " in errors
    for pid in (ready["master_pid"], ready["nodes"][0]["pid"]):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_daemon_that_dies_ends_it_with_the_reason() -> None:
    with Up("--json", "--listen", "127.0.0.1:0") as up:
        pid = up.facts()["nodes"][0]["pid"]
        up.line()
        os.kill(pid, signal.SIGKILL)
        status, _, errors = up.end()
    assert status == 2
    assert errors.endswith(f"kvstore: error: node-0 (pid {pid}) was killed by SIGKILL\n")


def test_up_prints_client_and_console_addresses() -> None:
    with Up("--listen", "127.0.0.1:0") as up:
        assert up.line().startswith("ready: clients connect to 127.0.0.1:")
        label, address = up.line().split()
        with urllib.request.urlopen(address, timeout=60) as page:
            assert (label, b"<title>kvstore</title>" in page.read()) == ("console:", True)
        up.process.terminate()
        assert up.end()[:2] == (0, "")


class ForkedCluster(LocalCluster):
    """Its daemons are forked, and Ctrl-C comes once it runs and waits for their end."""

    def __init__(self, plan: ClusterPlan, *, on_log: OnLog) -> None:
        super().__init__(plan, on_log=on_log, start=Forked)

    def wait_for_end(self) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` in this process: to start it and its daemons as programs is for the tests above."""
    monkeypatch.setattr(cli_up, "LocalCluster", ForkedCluster)


@pytest.mark.usefixtures("forked")
def test_where_there_is_no_console_none_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[master]\nhttp = ''\n")
    arguments = ["up", "--listen", "127.0.0.1:0", "--dram", "4MiB", "--config", str(tmp_path / "settings.toml")]
    told_lines = [json.loads(line) for line in CliRunner().invoke(kvstore, [*arguments, "--json"]).stdout.splitlines()]
    assert [(line["event"], line["console"]) for line in told_lines] == [("serving", ""), ("ready", ""), ("warm", "")]
    told = CliRunner().invoke(kvstore, arguments)
    assert (told.exit_code, told.stdout.count("\n"), told.stdout[:7]) == (0, 1, "ready: ")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--dram", "1KiB"], "node-0: dram is 1 KiB: give at least 4 KiB"),
        (["--nvme", "/nowhere/at/all:1MiB"], "/nowhere/at does not exist; mount its disk"),
        (["--nvme", "/proc/nowhere:1MiB"], "node-0: the NVMe folder /proc/nowhere cannot be written"),
        (["--nodes", "0"], "a local cluster has 1 to 64"),
        (["--catalog", "nonsense"], "master: catalog 'nonsense' is not one of"),
        (["--policy", "fifo"], "--policy: 'fifo' is not one of default, arc, gdsf"),
    ],
)
def test_what_cannot_be_met_is_one_clear_line_and_status_2(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(kvstore, ["up", "--dram", "4MiB", "--listen", "127.0.0.1:0", *arguments])
    assert done.exit_code == 2
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert complaint in errors[0]


def test_a_daemons_line_stays_as_it_is_beside_the_progress_bar() -> None:
    drawn = Console(file=io.StringIO(), width=20, force_terminal=True)
    line = "node-0 | " + "[bold]words :smile: " * 5
    with Progress(console=drawn) as progress:
        progress.add_task("touching", total=None)
        print_log(drawn, line)
    assert isinstance(drawn.file, io.StringIO)
    assert line + "\n" in drawn.file.getvalue()
