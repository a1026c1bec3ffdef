"""Promises of links.py: on real links in a network namespace, and of the comparison alone."""

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.protocol.errors import Broken
from kvstore.transfer.topology import links
from kvstore.transfer.topology.links import LinkChange, LinkWatch, changes
from kvstore.transfer.topology.model import Nic, NumaNode, Topology
from tests.namespaces import TwoHosts, run, two_hosts

NIC = Nic("eth0", interface="eth0", addresses=("10.0.0.1",), speed_gbit_s=10)
HOST = Topology("h", (NumaNode(0),), (NIC,))
LATE_S = 3600.0
"""An interval that no test lives to see: what comes is announced."""
WAIT_S = 20.0


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (None, NIC, "eth0 appeared"),
        (NIC, None, "eth0 disappeared"),
        (NIC, replace(NIC, is_up=False), "eth0 went down"),
        (replace(NIC, is_up=False), NIC, "eth0 went up"),
        (NIC, replace(NIC, addresses=()), "eth0 has the addresses none"),
        (NIC, replace(NIC, addresses=("10.0.0.2", "fd00::1")), "eth0 has the addresses 10.0.0.2, fd00::1"),
        (NIC, replace(NIC, speed_gbit_s=2.5), "eth0 runs at 2.5 Gbit/s"),
        (NIC, replace(NIC, numa_node=1), "eth0 is another device"),
    ],
)
def test_a_change_says_what_happened(before: Nic | None, after: Nic | None, text: str) -> None:
    old, new = (replace(HOST, nics=() if nic is None else (nic,)) for nic in (before, after))
    assert changes(old, new) == [LinkChange(before, after)]
    assert str(LinkChange(before, after)) == text


@contextlib.contextmanager
def reporting(hosts: TwoHosts, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.transfer.topology.link_report", *arguments]
    process = hosts.start(0, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    assert process.stdout.readline() == "closed\n"
    assert process.wait(WAIT_S) == 0
    process.stdout.close()


@pytest.mark.parametrize("arguments", [[str(LATE_S)], ["0.05", "deaf"]], ids=["announced", "looked at"])
def test_links_that_come_and_go_are_told(arguments: list[str]) -> None:
    with two_hosts(0, 0) as hosts, reporting(hosts, *arguments) as process:

        def until(text: str) -> str:
            """The report that has `text`; others, such as of addresses that IPv6 gives itself, may come before."""
            assert process.stdout is not None
            for line in process.stdout:
                if text in line:
                    return line
            raise AssertionError(f"never reported: {text}")

        namespace = hosts.names[0]
        run(["ip", "-n", hosts.names[1], "link", "set", "rail0", "down"])
        assert until("rail0 went down").endswith("- rail1\n")
        run(["ip", "-n", hosts.names[1], "link", "set", "rail0", "up"])
        assert until("rail0 went up").endswith("- rail0,rail1\n")
        run(["ip", "-n", namespace, "address", "add", "10.88.0.1/24", "dev", "rail1"])
        assert "10.88.0.1" in until("rail1 has the addresses")
        run(["ip", "-n", namespace, "link", "add", "extra", "type", "veth", "peer", "name", "other"])
        run(["ip", "-n", namespace, "address", "add", "10.89.0.1/24", "dev", "extra"])
        until("extra appeared")
        run(["ip", "-n", namespace, "link", "delete", "extra"])
        until("extra disappeared")


class Looks:
    """A machine with scripted topologies; the last one stays."""

    def __init__(self, *looks: Topology | Exception) -> None:
        self._looks = list(looks)

    def __call__(self) -> Topology:
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if isinstance(look, Exception):
            raise look
        return look


DOWN = replace(HOST, nics=(replace(NIC, is_up=False),))


def test_a_failed_read_is_logged_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    looks = Looks(HOST, Broken("no netlink"), Broken("no netlink"), DOWN)
    watch = LinkWatch(looks, lambda topology, found: told.set(), poll_interval_s=0.01)
    assert watch.topology is HOST
    with caplog.at_level(logging.INFO, "kvstore.transfer"):
        watch.start()
        assert told.wait(WAIT_S)
        watch.close()
    assert watch.topology is DOWN
    assert [record.message for record in caplog.records] == [
        "cannot read the links: no netlink",
        "links: eth0 went down",
    ]


def test_a_failing_callback_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    twice = threading.Event()
    calls: list[Topology] = []

    def fail(topology: Topology, found: list[LinkChange]) -> None:
        calls.append(topology)
        if len(calls) == 2:
            twice.set()
        raise ValueError("broken receiver")

    watch = LinkWatch(Looks(HOST, DOWN, HOST), fail, poll_interval_s=0.01)
    watch.start()
    assert twice.wait(WAIT_S)
    watch.close()
    assert calls == [DOWN, HOST]
    assert "a callback of link changes failed" in caplog.text


def test_a_look_that_finds_no_change_is_told_of_too() -> None:
    looked = threading.Event()
    changed: list[Topology] = []
    watch = LinkWatch(Looks(HOST), lambda topology, found: changed.append(topology), poll_interval_s=0.01, on_unchanged=looked.set)
    watch.start()
    assert looked.wait(WAIT_S)
    watch.close()
    assert not changed


def refuse() -> None:
    """Simulates a seccomp filter that refuses netlink sockets."""
    raise PermissionError(1, "Operation not permitted")


def test_changes_are_noticed_by_netlink_or_by_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, for the coverage of both ways; what they find is tested above."""
    for deaf in (False, True):
        if deaf:
            monkeypatch.setattr(links, "open_changes", refuse)
        told = threading.Event()
        watch = LinkWatch(Looks(HOST, HOST, DOWN), lambda topology, found, told=told: told.set(), poll_interval_s=0.01)  # type: ignore[misc]
        watch.start()
        assert told.wait(WAIT_S)
        watch.close()
