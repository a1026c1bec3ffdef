"""Promises of address.py; connecting with TLS: test_connecting.py."""

import os
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.rpc.address import (
    NOT_LOCAL,
    Address,
    ResolvedAddresses,
    connect,
    host_id,
    is_local_socket,
    local_socket_problem,
    parse_address,
    resolve,
    socket_id,
)
from kvstore.rpc.reactor import Reactor
from kvstore.testing.transfer.awaited import within
from tests.forks import told_by_child
from tests.garbage import assert_no_garbage
from tests.ports import free_ports
from tests.rpc.unanswering import black_hole, has_addresses
from tests.users import GROUP, IS_ROOT, become_another, common_folder


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7440", Address("127.0.0.1", 7440)),
        ("master.example:0", Address("master.example", 0)),
        ("[::1]:65535", Address("::1", 65535)),
        ("unix:/run/kvstore/node.sock", Address(unix="/run/kvstore/node.sock")),
    ],
)
def test_an_address_reads_back_as_it_is_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "[]:80", "host:x", "host:-1", "host:65536", "host:" + "9" * 5000])
def test_anything_else_is_misuse_and_told_the_form(text: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize("text", ["http://127.0.0.1:7440", "grpc://host:1", "host/path:1", " host:1", "a b:1"])
def test_a_scheme_a_path_or_a_space_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT, without a scheme or a path"):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_misuse(text: str) -> None:
    try:
        address = parse_address(text)
    except InvalidArgument:
        return
    assert parse_address(str(address)) == address


def test_a_socket_file_is_told_from_another_at_the_same_path(tmp_path: Path) -> None:
    path, aside = str(tmp_path / "s"), str(tmp_path / "aside")
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.bind(path)
        told = socket_id(path)
        assert told.startswith(host_id() + "/")
        assert is_local_socket(path, told)
        os.rename(path, aside)
        assert not is_local_socket(path, told), "there is none"
        second.bind(path)
        assert not is_local_socket(path, told), "it is another"
        assert is_local_socket(aside, told)
    assert not is_local_socket("", told)
    assert not is_local_socket("not\0a path", told)


def test_a_socket_that_is_not_to_be_had_says_why(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        told = socket_id(path)
    assert local_socket_problem(path, told) == ""
    assert local_socket_problem("", told) == local_socket_problem(path, "another boot/1:2") == NOT_LOCAL
    assert (
        local_socket_problem(path, f"{host_id()}/1:2")
        == f"{path} is another daemon's socket in this mount namespace: mount the intended daemon's folder at that path"
    )
    os.unlink(path)
    assert local_socket_problem(path, told) == f"there is no {path} in this mount namespace: mount its folder at that path"


def test_denied_reason_names_path_and_remedy() -> None:
    with common_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        run_dir = folder / "run"
        run_dir.mkdir()
        path = run_dir / "s"
        listener.bind(str(path))
        told = socket_id(str(path))

        def reason() -> str:
            become_another(is_member=False)
            assert not is_local_socket(str(path), told)
            return local_socket_problem(str(path), told)

        only_owner = "it is only for its owner; set the daemon's socket_group to a group that this user is in"
        path.chmod(0o600 if IS_ROOT else 0)
        assert told_by_child(reason) == f"permission denied on {path}: {only_owner}"
        os.chown(path, -1, GROUP.gr_gid)
        path.chmod(0o660 if IS_ROOT else 0o060)
        assert told_by_child(reason) == f"permission denied on {path}: put this user in group {GROUP.gr_name}"
        run_dir.chmod(0o700 if IS_ROOT else 0)
        assert told_by_child(reason) == f"permission denied on {run_dir}: {only_owner}"
        os.chown(run_dir, -1, GROUP.gr_gid)
        run_dir.chmod(0o710 if IS_ROOT else 0o010)
        assert told_by_child(reason) == f"permission denied on {run_dir}: put this user in group {GROUP.gr_name}"
        run_dir.chmod(0o700)


def test_connect_leaves_time_for_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with black_hole() as silent, socket.create_server(("127.0.0.1", 0)) as listener:
        has_addresses(monkeypatch, silent, listener.getsockname())
        with connect(Address("host", 1), timeout_s=1) as sock:
            assert sock.getpeername() == listener.getsockname()


def test_all_addresses_of_a_host_together_have_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty that do not answer would take 40 s if each had all of it."""
    with black_hole() as silent:
        has_addresses(monkeypatch, *[silent] * 40)
        with within(1), pytest.raises(TimeoutError):
            connect(Address("host", 1), timeout_s=1)


def test_a_connection_comes_from_the_address_asked_for() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        connect(Address(*listener.getsockname()), timeout_s=5, source="127.0.0.9") as sock,
    ):
        assert sock.getsockname()[0] == "127.0.0.9"


def test_a_failed_connection_leaves_nothing_to_the_collector() -> None:
    nobody = Address("127.0.0.1", free_ports(1)[0])

    def fail() -> None:
        with pytest.raises(OSError, match="refused"):
            connect(nobody, timeout_s=5)

    assert_no_garbage(fail)


def test_a_name_that_cannot_be_a_hosts_is_an_os_error() -> None:
    with pytest.raises(OSError, match="not a host name"):
        connect(Address("a" * 64, 80), timeout_s=1)


Answers = SimpleQueue[ResolvedAddresses | OSError]


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def reactor() -> Any:
    reactor = Reactor()
    yield reactor
    reactor.close()


def serve(reactor: Reactor, answers: Answers) -> ResolvedAddresses | OSError:
    """The next answer, which comes in the loop."""
    while answers.empty():
        reactor.run_once(10)
    return answers.get()


def test_a_names_addresses_come_in_the_loop(reactor: Reactor, answers: Answers) -> None:
    threads: list[threading.Thread] = []

    def on_found(found: ResolvedAddresses | OSError) -> None:
        threads.append(threading.current_thread())
        answers.put(found)

    resolve(reactor, Address("localhost", 7), on_found)
    found = serve(reactor, answers)
    assert isinstance(found, list)
    assert found[0][1][:2] in [("127.0.0.1", 7), ("::1", 7)]
    assert threads == [threading.current_thread()]


def test_a_name_of_nobody_and_one_that_is_none_are_os_errors(reactor: Reactor, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(reactor, Address("a" * 64, 7), answers.put)
    assert "not a host name" in str(serve(reactor, answers))

    def fails(*args: Any, **keywords: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "nobody")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    resolve(reactor, Address("nobody", 7), answers.put)
    assert isinstance(serve(reactor, answers), socket.gaierror)
