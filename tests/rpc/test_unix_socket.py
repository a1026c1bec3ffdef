"""Promises of access.py."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE

import pytest

from kvstore.protocol.errors import ConfigError, Unauthorized
from kvstore.protocol.session_messages import Failure
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import ConnectionLimits, NullHandler, Server
from kvstore.rpc.unix_socket import MIN_AGE_S, UNCHANGED, SocketAccess, remove_stale_sockets
from tests.forks import told_by_child
from tests.rpc.wires import read_frame
from tests.users import GROUP, IS_ROOT, NOBODY, become_another, common_folder, shut_out

UNKNOWN_GID = 987_654
"""A gid without a name, which only root can give to a file."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with common_folder() as found:
        yield found


@pytest.fixture
def server() -> Iterator[Server]:
    reactor = Reactor()
    server = Server(reactor, NullHandler(), ConnectionLimits(10))
    yield server
    server.close()
    reactor.close()


def permissions(path: Path) -> tuple[int, int]:
    found = path.stat()
    return S_IMODE(found.st_mode), found.st_gid


def connected(path: Path, *, is_member: bool) -> str:
    """Connect from another user's process. Return "None", or the error."""

    def connect() -> None:
        become_another(is_member=is_member)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))

    return told_by_child(connect)


@pytest.mark.parametrize(
    ("group", "mode", "access"),
    [
        ("", "", SocketAccess(UNCHANGED, 0o600)),
        ("", "0600", SocketAccess(UNCHANGED, 0o600)),
        ("", "660", SocketAccess(os.getegid(), 0o660)),
        ("", "0606", SocketAccess(UNCHANGED, 0o606)),
        (GROUP.gr_name, "", SocketAccess(GROUP.gr_gid, 0o660)),
        (str(UNKNOWN_GID), "0666", SocketAccess(UNKNOWN_GID, 0o666)),
    ],
)
def test_settings_name_a_group_and_a_mode(group: str, mode: str, access: SocketAccess) -> None:
    assert SocketAccess.chosen(group, mode) == access


@pytest.mark.parametrize(
    ("group", "mode", "says"),
    [
        ("no-such-group", "", "socket_group is 'no-such-group': this host has no such group"),
        ("9999999999", "", "this host has no such group"),
        *(("", mode, f"socket_mode is '{mode}'") for mode in ("0770", "rw", "0060", "888", "066", "6", "00660", "-660")),
    ],
)
def test_a_group_or_mode_that_there_is_not_is_refused(group: str, mode: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SocketAccess.chosen(group, mode)


@pytest.mark.promise("least-privilege")
def test_only_group_members_connect_in_a_new_folder(server: Server, folder: Path) -> None:
    path = folder / "run" / "node.sock"
    server.listen_unix(path, SocketAccess.chosen(GROUP.gr_name, ""))
    assert permissions(path) == (0o660, GROUP.gr_gid)
    assert permissions(path.parent) == (0o710, GROUP.gr_gid)
    assert connected(path, is_member=True) == "None"
    with shut_out(path.parent):
        assert "PermissionError" in connected(path, is_member=False)


@pytest.mark.promise("least-privilege")
def test_nothing_else_in_the_folder_becomes_theirs(server: Server, folder: Path) -> None:
    run_dir = folder / "run"
    private = server.listen_unix(run_dir / "transfer.sock")
    server.listen_unix(run_dir / "node.sock", SocketAccess.chosen(GROUP.gr_name, ""))
    (run_dir / "node-1.name").touch(0o600)
    assert permissions(Path(private))[0] == permissions(run_dir / "node-1.name")[0] == 0o600
    if IS_ROOT:
        assert "PermissionError" in connected(Path(private), is_member=True)
    assert permissions(run_dir)[0] & 0o060 == 0, "its names are not listed"


def test_every_user_connects_where_the_mode_says_so(server: Server, folder: Path) -> None:
    path = folder / "run" / "node.sock"
    server.listen_unix(path, SocketAccess.chosen("", "0666"))
    assert permissions(path)[0] == 0o666
    assert permissions(path.parent)[0] == 0o711
    assert connected(path, is_member=False) == "None"


@pytest.mark.parametrize("mode", [0o750, 0o755, 0o1777, 0o2770])
def test_a_folder_that_they_can_enter_stays_as_it_is(server: Server, folder: Path, mode: int) -> None:
    run_dir = folder / "run"
    run_dir.mkdir()
    os.chown(run_dir, -1, GROUP.gr_gid)
    run_dir.chmod(mode)
    server.listen_unix(run_dir / "node.sock", SocketAccess.chosen(GROUP.gr_name, ""))
    assert permissions(run_dir) == (mode, GROUP.gr_gid)
    assert connected(run_dir / "node.sock", is_member=True) == "None"


def test_folder_of_another_group_is_refused_and_unchanged(server: Server, folder: Path) -> None:
    run_dir = folder / "run"
    run_dir.mkdir()
    run_dir.chmod(0o750)
    before, descriptors = permissions(run_dir), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=rf"{run_dir} is open to group .*, not to {UNKNOWN_GID}: take another run_dir"):
        server.listen_unix(run_dir / "node.sock", SocketAccess.chosen(str(UNKNOWN_GID), ""))
    assert permissions(run_dir) == before
    assert list(run_dir.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_group_that_user_may_not_use_is_refused_without_trace(server: Server, folder: Path) -> None:
    path = folder / "run" / "node.sock"
    path.parent.mkdir(mode=0o777)
    path.parent.chmod(0o777)

    def listen() -> str:
        become_another(is_member=False)
        try:
            return server.listen_unix(path, SocketAccess.chosen(str(UNKNOWN_GID), ""))
        except ConfigError as error:
            return f"{error} {list(path.parent.iterdir())}"

    told = told_by_child(listen)
    assert told == f"cannot open {path} to group {UNKNOWN_GID}, 0660: Operation not permitted: run as a member of that group, or as root []"


def answered(server: Server, path: Path, *, is_member: bool, says: bytes) -> str:
    """Bytes received by another user's process that connects and sends `says`, until the connection closes."""

    def listen() -> str:
        become_another(is_member=is_member)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(str(path))
            if says:
                sock.sendall(says)
            failure = read_frame(sock)[1]
        assert isinstance(failure, Failure)
        return f"{failure.code} {failure.text}"

    told: list[str] = []
    child = threading.Thread(target=lambda: told.append(told_by_child(listen)))
    child.start()
    while child.is_alive():
        server._reactor.run_once(0.05)
    child.join()
    return told[0]


@pytest.mark.promise("least-privilege")
@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_admits_refuses_others_even_if_file_mode_was_changed(server: Server, folder: Path) -> None:
    path = folder / "run" / "node.sock"
    server.listen_unix(path, SocketAccess.chosen(GROUP.gr_name, ""))
    path.chmod(0o666)
    path.parent.chmod(0o711)
    assert answered(server, path, is_member=True, says=bytes(24)).startswith("602 "), "a member is heard; what he says is no frame"
    refused = answered(server, path, is_member=False, says=b"")
    only_for = f"group {GROUP.gr_name}, 0660"
    assert refused == f"{Unauthorized.code} this Unix socket is for its owner, root and {only_for}: see socket_group (docs/sharing.md)"


@pytest.mark.promise("least-privilege")
@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_owner_only_socket_admits_no_other_user(server: Server, folder: Path) -> None:
    path = folder / "run" / "node.sock"
    server.listen_unix(path)
    path.chmod(0o666)
    path.parent.chmod(0o711)
    for is_member in (True, False):
        assert answered(server, path, is_member=is_member, says=b"").startswith(f"{Unauthorized.code} ")


@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_admits_any_supplementary_group_up_to_the_limit() -> None:
    access = SocketAccess(UNKNOWN_GID, 0o660)
    for count, is_in in ((3, True), (300, False)):

        def connect(count: int = count) -> bool:
            os.setgroups([*range(100_000, 100_000 + count - 1), UNKNOWN_GID])
            os.setgid(NOBODY.pw_gid)
            os.setuid(NOBODY.pw_uid)
            ours, theirs = socket.socketpair()
            with ours, theirs, pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "geteuid", lambda: 4711)
                return access.admits(ours)

        assert told_by_child(connect) == str(is_in)


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
    remove_stale_sockets(tmp_path)
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
        remove_stale_sockets(tmp_path)
        assert all(path.exists() for path in (young, foreign, file, tmp_path / "node-3.sock"))
