"""Forked daemons end, are told things and tell things as programs do."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvstore.transfer.testing.waiting import PATIENCE_S
from tests.forked import COMMAND, Forked, is_forked
from tests.line_child import LineChild

MASTER = "kvstore.master.daemon"


def test_one_that_refuses_its_settings_says_so_and_has_its_exit_status() -> None:
    forked = Forked(MASTER, ["--listen", "127.0.0.1:0"], environment={"KVSTORE_MASTER_NODE_TTL_S": "soon"})
    assert forked.wait(PATIENCE_S) == forked.returncode == 2
    assert forked.stdout is not None
    assert forked.stderr is not None
    with forked.stdout, forked.stderr:
        assert forked.stdout.read() == ""
        assert "KVSTORE_MASTER_NODE_TTL_S" in forked.stderr.read()


def test_one_runs_until_it_is_killed_with_a_log_and_a_process_group_of_its_own(tmp_path: Path) -> None:
    flags = ["--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--run-dir", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        forked = Forked(MASTER, flags, environment={}, stderr=log)
    assert forked.stdout is not None
    with forked.stdout:
        assert f'"pid": {forked.pid}' in forked.stdout.readline()
        assert os.getpgid(forked.pid) == forked.pid
        assert os.readlink(f"/proc/{forked.pid}/fd/2") == str(tmp_path / "log")
        assert forked.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(0.01)
        forked.kill()
        assert forked.wait(PATIENCE_S) == forked.poll() == -signal.SIGKILL
        forked.terminate()  # of one that has ended: nothing


def test_a_command_runs_where_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("nothing of the kind")
    for arguments, complaint in (
        (["lab", "trace"], "line 1: not JSON"),
        (["lab", "elsewhere"], "cannot read the trace elsewhere"),
        (["there is no such command"], "No such command"),
    ):
        with (tmp_path / "log").open("wb") as log:
            forked = Forked(COMMAND, arguments, environment=os.environ, stderr=log, folder=tmp_path)
        assert forked.stdout is not None
        with forked.stdout:
            assert (forked.stdout.read(), forked.wait(PATIENCE_S)) == ("", 2)
        assert complaint in (tmp_path / "log").read_text()


def test_one_hears_what_is_written_to_it_and_is_told_apart_from_others() -> None:
    with LineChild("tests.heard") as child:
        assert child.tell("a line") == ["a line", True]
    assert not is_forked()
