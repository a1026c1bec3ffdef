"""Clients of a node's host that another Unix user runs: in the node's shared memory where `socket_group` lets them in, and over TCP where
it does not."""

import encodings.idna  # noqa: F401 - loaded at the first look-up of a name, by when Python's own folder may be closed to this user
import io
import logging
import stat
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from tests.system.running import System, heard, process
from tests.users import GROUP, IS_ROOT, become_another, common_folder, shut_out

SMALL, LARGE = b"small" * 100, bytes(range(256)) * 1024
VALUES = {b"small": SMALL, b"large": LARGE}


@pytest.fixture
def shared() -> Iterator[System]:
    """A master and a node, both with GROUP; VALUES are put."""
    with common_folder() as folder, System(folder) as system:
        system.start_master(0, "--socket-group", GROUP.gr_name)
        system.start_node("n0", "--dram", "32MiB", "--socket-group", GROUP.gr_name)
        with system.client() as client:
            assert client.put_batch(list(VALUES), list(VALUES.values())) == [True, True]
        yield system


def reads_and_writes(connection: Connection, address: str, is_member: bool) -> None:
    """In a process of another user: what it reads, whether it can look at it in place, and what it says of that."""
    become_another(is_member=is_member)
    logged = io.StringIO()
    logging.getLogger("kvstore.client").addHandler(logging.StreamHandler(logged))
    with Client(address, settings=ClientSettings(ack="cluster")) as client:
        told: dict[str, Any] = {"put": client.put(b"theirs", LARGE[::-1]), "got": client.get_batch([*VALUES, b"theirs"])}
        with client.view(b"large") as memory:
            told["viewed"] = bytes(memory) if memory is not None else None
            told["is_in_place"] = "/memfd:kvstore" in Path("/proc/self/maps").read_text()
        told["shares_memory"] = client.shared_memory()
        told["logged"] = logged.getvalue().splitlines()
        connection.send(told)
        connection.recv()


@pytest.mark.promise("least-privilege")
def test_group_member_puts_gets_and_views_in_shared_memory(shared: System) -> None:
    with process(reads_and_writes, shared.address, True) as (_, member):
        told = heard(member)
        assert (told["put"], told["got"], told["viewed"]) == (True, [SMALL, LARGE, LARGE[::-1]], LARGE)
        assert (told["is_in_place"], told["shares_memory"], told["logged"]) == (True, {"n0": ""}, [])
        with shared.client() as ours:
            assert ours.get(b"theirs") == LARGE[::-1]
            assert ours.remove([b"large"], force=True) == 1


def test_the_masters_socket_is_the_groups_too(shared: System) -> None:
    [path] = (shared.folder / "m0").glob("master-*.sock")
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, GROUP.gr_gid)


@pytest.mark.promise("least-privilege")
@pytest.mark.promise("observable")
def test_who_is_not_in_the_group_reads_and_writes_over_tcp(shared: System) -> None:
    with shut_out(shared.folder / "n0"), process(reads_and_writes, shared.address, False) as (_, stranger):
        told = heard(stranger)
        assert (told["put"], told["got"], told["viewed"]) == (True, [SMALL, LARGE, LARGE[::-1]], LARGE)
        # If the tests do not run as root, the folder is closed to its owner instead.
        todo = (
            f"put this user in group {GROUP.gr_name}" if IS_ROOT else "it is only for its owner; set the daemon's socket_group to a group"
        )
        [(node, reason)] = told["shares_memory"].items()
        assert node == "n0"
        assert reason.startswith(f"permission denied on {shared.folder / 'n0'}: {todo}")
        assert (told["is_in_place"], told["logged"]) == (False, [f"node 'n0' of this host is not reached through shared memory: {reason}"])
