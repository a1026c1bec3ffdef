"""Promises of socket_files.py: what dead processes left goes, and nothing else."""

import os
import socket
from pathlib import Path

import pytest

from kvstore.rpc.socket_files import MIN_AGE_S, remove_dead, sweep


def left(path: Path, *, age_s: float = 2 * MIN_AGE_S) -> Path:
    """A socket file as a killed process leaves it."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    age(path, age_s)
    return path


def age(path: Path, age_s: float) -> None:
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    dead = [left(tmp_path / name) for name in ("node-7450.sock", "master-7440.sock", "transfer-12-ab.sock")]
    sweep(tmp_path)
    assert not any(path.exists() for path in dead)


def test_live_young_and_foreign_sockets_and_files_stay(tmp_path: Path) -> None:
    young, foreign = left(tmp_path / "node-1.sock", age_s=0), left(tmp_path / "theirs.sock")
    file = tmp_path / "node-2.sock"
    file.write_text("data")
    age(file, 2 * MIN_AGE_S)
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(tmp_path / "node-3.sock"))
        alive.listen()
        age(tmp_path / "node-3.sock", 2 * MIN_AGE_S)
        sweep(tmp_path)
        assert all(path.exists() for path in (young, foreign, file, tmp_path / "node-3.sock"))


def test_a_folder_that_cannot_be_listed_is_no_trouble(tmp_path: Path) -> None:
    sweep(tmp_path / "absent")


def test_somebody_who_listens_is_an_error(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(tmp_path / "a"))
        alive.listen()
        with pytest.raises(OSError, match="another process listens there"):
            remove_dead(tmp_path / "a")
