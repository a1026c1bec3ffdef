"""Promises of record.py, through the command line, with a cluster of real processes."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.cli import record as cli_record
from kvstore.cli.command_group import CommandGroup
from kvstore.cli.record import interrupts, record
from kvstore.client import Client
from kvstore.client.recorder import Recorder
from kvstore.kvcache.traces.event_file import BlockEvent, LostEvents, read_events
from kvstore.store.block_table.event_log import RING_EVENTS
from tests.forked import COMMAND, Forked


def run(*arguments: str) -> Result:
    return CliRunner().invoke(CommandGroup(commands={"record": record}), ["record", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it_with_all_that_happened_before(master: str, tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "events.jsonl"
    flags = [str(path), "--master", master, "--tenant", number.name, "--json"]
    child = Forked(COMMAND, ["record", *flags], environment=os.environ)
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        assert child.stderr.readline() == "recording nodes: node-0; Ctrl-C ends it\n"
        with Client(master, tenant=number.name) as client:
            client.put(b"a", b"1")
            client.get(b"a")
            client.remove([b"a"])
        child.send_signal(number)
        assert (child.wait(120), child.stderr.read()) == (0, "")
        summary = json.loads(child.stdout.read())
    assert summary.pop("seconds") > 0
    assert summary == {"file": str(path), "stored": 1, "read": 1, "removed": 1, "lost": 0, "interruptions": 0}
    kinds = [event.kind for event in read_events(path) if isinstance(event, BlockEvent)]
    assert kinds == ["stored", "read", "removed"]


def test_it_ends_by_itself_after_the_duration(master: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    result = run(str(path), "--master", master, "--duration", "0.3")
    assert result.exit_code == 0
    assert result.stderr == "recording nodes: node-0; for 0.3 s\n"
    assert re.fullmatch(rf"{re.escape(str(path))}: 0 blocks stored, 0 read, 0 removed in \d+\.\d s\n", result.stdout)
    assert list(read_events(path)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_nothing_and_is_noted(number: signal.Signals) -> None:
    with interrupts() as interrupted:
        assert not interrupted.is_set()
        signal.raise_signal(number)
        assert interrupted.is_set()


def test_lost_events_are_in_the_summary(master: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"%d" % number for number in range(2000)]
    with Client(master) as client:
        client.put_batch(keys, [b"1"] * len(keys))

        class Late(Recorder):
            """Before it looks for the first time more is read than a node keeps."""

            left = RING_EVENTS // len(keys) + 1

            def poll(self) -> list[BlockEvent | LostEvents]:
                for _ in range(self.left):
                    client.get_batch(keys)
                self.left = 0
                return super().poll()

        monkeypatch.setattr(cli_record, "Recorder", Late)
        result = run(str(tmp_path / "file"), "--master", master, "--duration", "0.1")
    assert result.exit_code == 0
    assert re.search(r"^node node-0 overwrote \d+ events before they were fetched$", result.stderr, re.MULTILINE)
    assert "\nincomplete: " in result.stdout


def test_a_file_that_cannot_be_written_is_misuse(master: str, tmp_path: Path) -> None:
    result = run(str(tmp_path / "away" / "file"), "--master", master)
    assert result.exit_code == 2
    assert "kvstore: error: cannot write" in result.stderr


def test_a_full_disk_ends_it_with_what_the_system_said(master: str) -> None:
    result = run("/dev/full", "--master", master)
    assert result.exit_code == 2
    assert result.stderr.endswith("kvstore: error: cannot write /dev/full: No space left on device\n")


def test_no_master_is_one_clear_line_and_no_file(tmp_path: Path) -> None:
    result = run(str(tmp_path / "file"), "--master", "127.0.0.1:1")
    assert result.exit_code == 2
    assert result.stderr.startswith("kvstore: error: no master can be reached: cannot connect to 127.0.0.1:1")
    assert not (tmp_path / "file").exists()
