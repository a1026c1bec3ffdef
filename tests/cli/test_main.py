"""Promises of main.py: what every command has in common."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.protocol.errors import ChecksumMismatch, Full, KVStoreError
from tests.client.embedded import embedded
from tests.ports import free_ports

PLAN = ["plan", "--model", "llama3-8b", "--gpu", "H100"]
PROGRAM = [sys.executable, "-m", "kvstore.cli.main"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster that the tests only look at."""
    with embedded() as cluster:
        yield cluster.address


def commands() -> list[str]:
    return kvstore.list_commands(click.Context(kvstore))


def test_a_command_loads_what_it_needs_and_nothing_else() -> None:
    """The version needs no more than settings do; with all commands loaded it took ten times as long."""
    program = "import sys; from kvstore.cli.main import kvstore; kvstore(['forget', '--help'], standalone_mode=False);print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "kvstore.cli.drain" in loaded
    assert not {"kvstore.cli.blocks", "kvstore.transfer.engine", "numpy"} & set(loaded)


def test_every_command_says_that_it_is_the_one_asked_for() -> None:
    context = click.Context(kvstore)
    assert [command.name for command in map(partial(kvstore.get_command, context), commands()) if command is not None] == commands()


@pytest.mark.parametrize(
    ("error", "status"), [(Full("no room"), 2), (ChecksumMismatch("damaged"), 1), (KVStoreError("odd"), 2), (KeyboardInterrupt(), 130)]
)
def test_an_error_is_one_line_and_a_status(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setitem(kvstore.commands, "failing", failing)
    result = CliRunner().invoke(kvstore, ["failing"])
    assert result.exit_code == status
    assert result.stderr == (f"kvstore: error: {error}\n" if isinstance(error, KVStoreError) else "")


@pytest.mark.parametrize("command", [["status"], ["exists", "key"], ["put", "key", "-"], ["keys"]])
def test_a_master_that_is_not_there_is_said_in_one_line(command: list[str]) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    result = CliRunner().invoke(kvstore, [*command, "--master", address, "--deadline-s", "5"], input=b"value")
    assert result.exit_code == 2
    assert result.stderr.startswith("kvstore: error: no master can be reached: ")
    assert address in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = subprocess.Popen([*PROGRAM, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    process.wait(20)


@pytest.mark.parametrize("command", [["--help"], PLAN])
def test_a_full_disk_under_its_output_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.stderr == "kvstore: error: standard output cannot be written: No space left on device\n"
    assert ended.returncode == 2


def test_full_disk_elsewhere_is_not_blamed_on_output() -> None:
    program = """
from kvstore.cli.exit_signals import run_with_output_errors

def fills() -> None:
    raise OSError(28, "No space left on device", "/tmp/trace")

run_with_output_errors(fills, 2)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stderr, ended.returncode) == ("kvstore: error: /tmp/trace cannot be written: No space left on device\n", 2)


@pytest.mark.parametrize("command", [["--help"], PLAN])
def test_closed_output_is_no_traceback(command: list[str]) -> None:
    ended = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, *command], stderr=subprocess.PIPE, timeout=120, check=False)
    assert (ended.stderr, ended.returncode) == (b"", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_command_with_130_and_no_traceback(address: str, number: signal.Signals) -> None:
    command = [*PROGRAM, "top", "--json", "--interval-s", "1", "--master", address, "--deadline-s", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 130


def test_what_is_to_outlive_its_terminal_does(address: str) -> None:
    command = ["nohup", *PROGRAM, "top", "--json", "--interval-s", "0.1", "--master", address, "--deadline-s", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        for _ in range(3):
            assert process.stdout.readline()
        process.terminate()
