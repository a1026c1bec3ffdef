"""Promises of the two hosts that tests of several rails run on."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import namespaces
from tests.namespaces import PREFIX, Cut, TwoHosts, two_hosts, why_not

PORT = 7700
CALL_TIMEOUT_S = 60.0
LOST_TIMEOUT_S = 0.3
ECHO = f"""
import socket, threading

def echo(peer):
    while data := peer.recv(65536):
        peer.sendall(data)

listener = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
"""
"""Sends back what comes."""
CALLER = f"""
import socket, sys

peer, sent, got = None, 0, 0
for line in sys.stdin:
    source, address, timeout_s = line.split()
    try:
        if peer is None:
            peer = socket.create_connection((address, {PORT}), float(timeout_s), (source, 0))
        peer.settimeout(float(timeout_s))
        peer.sendall(bytes(1000))
        sent += 1000
        while got < sent:
            got += len(peer.recv(65536))
        print("arrived", got, flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""
"""For each line: sends 1,000 bytes more on one connection, waits for all to come back, and tells."""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Rails of 1 and 2 Gbit/s and one without a limit; host 1 echoes."""
    with two_hosts(1, 2, 0) as found:
        server = found.start(1, [sys.executable, "-S", "-c", ECHO], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield found


class Caller:
    """A process on host 0 that talks to the echo over one rail, on one connection."""

    def __init__(self, hosts: TwoHosts, rail: int) -> None:
        self._addresses = hosts.rails[rail].addresses
        pipe = subprocess.PIPE
        self._process = hosts.start(0, [sys.executable, "-S", "-u", "-c", CALLER], stdin=pipe, stdout=pipe, text=True)

    def call(self, timeout_s: float = CALL_TIMEOUT_S) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*self._addresses, timeout_s, file=self._process.stdin, flush=True)
        return str(self._process.stdout.readline()).strip()


def test_bytes_go_to_and_fro_on_every_rail(hosts: TwoHosts) -> None:
    for rail in range(3):
        assert Caller(hosts, rail).call() == "arrived 1000"


def test_rails_are_shaped_at_both_ends_and_one_without_a_rate_is_not(hosts: TwoHosts) -> None:
    for host in (0, 1):
        shapers = json.loads(hosts.run(host, ["tc", "-j", "qdisc", "show"]))
        rates = {each["dev"]: each["options"]["rate"] for each in shapers if each["kind"] == "tbf"}
        assert rates == {"rail0": 125_000_000, "rail1": 250_000_000}


def test_a_silent_cut_loses_packets_of_one_rail_and_open_connections_go_on_after_it(hosts: TwoHosts) -> None:
    cut, whole = Caller(hosts, 0), Caller(hosts, 1)
    assert cut.call() == "arrived 1000"
    hosts.cut(0)
    assert cut.call(LOST_TIMEOUT_S) == "TimeoutError"
    assert Caller(hosts, 0).call(LOST_TIMEOUT_S) == "TimeoutError"
    assert whole.call() == "arrived 1000"
    hosts.restore(0)
    assert cut.call() == "arrived 3000"


def test_a_link_that_is_down_loses_its_carrier_at_the_other_end_and_comes_back(hosts: TwoHosts) -> None:
    cut, whole = Caller(hosts, 2), Caller(hosts, 1)
    assert cut.call() == "arrived 1000"
    hosts.cut(2, Cut.LINK_DOWN)
    assert hosts.run(0, ["cat", "/sys/class/net/rail2/carrier"]) == "0\n"
    assert cut.call(LOST_TIMEOUT_S) in ("TimeoutError", "OSError")
    assert whole.call() == "arrived 1000"
    hosts.restore(2)
    assert hosts.run(0, ["cat", "/sys/class/net/rail2/carrier"]) == "1\n"
    assert Caller(hosts, 2).call() == "arrived 1000"


def test_a_rail_can_be_cut_again_in_another_way(hosts: TwoHosts) -> None:
    for kind in (Cut.SILENT, Cut.LINK_DOWN, Cut.SILENT):
        hosts.cut(1, kind)
        assert not Caller(hosts, 1).call(LOST_TIMEOUT_S).startswith("arrived")
        hosts.restore(1)
        assert Caller(hosts, 1).call() == "arrived 1000"


def test_after_a_failure_no_namespace_and_no_process_is_left() -> None:
    with pytest.raises(ZeroDivisionError), two_hosts(0) as hosts:
        process = hosts.start(0, ["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write("not flushed")
        _ = 1 // 0
    assert process.returncode == -9
    assert not set(hosts.names) & set(namespaces.namespaces())
    hosts.close()


def test_hosts_that_cannot_be_made_quote_the_program_and_leave_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"tc .* rate"), two_hosts(0, -1):
        pass
    assert not [name for name in namespaces.namespaces() if name.startswith(f"{PREFIX}-{os.getpid()}-")]


def test_namespaces_of_killed_test_processes_are_removed_by_the_next() -> None:
    with two_hosts(0):
        dead = subprocess.Popen(["true"])
        dead.wait()
        name = f"{PREFIX}-{dead.pid}-0-0"
        namespaces.run(["ip", "netns", "add", name])
        namespaces.remove_leftovers()
        assert name not in namespaces.namespaces()
        assert f"{PREFIX}-{os.getpid()}" in " ".join(namespaces.namespaces())


def test_who_is_not_root_is_told_and_the_test_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="need root"), two_hosts(0):
        pass


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install iproute2" in why_not()


def test_a_machine_that_permits_no_namespaces_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for program in namespaces.PACKAGES:
        (tmp_path / program).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "CAP_SYS_ADMIN" in why_not()
    assert "exit status 1" in why_not()
