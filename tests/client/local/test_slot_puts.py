"""Promises of slot_put.py, against a running cluster: large puts are a copy and one message, and no slot is ever lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.protocol.errors import Unavailable
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import CommitPuts, OpenSlotAhead, OpenSlots
from kvstore.protocol.writer_page import MAX_SLOT_AHEAD_BYTES
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.memory.memcpy import MemcpyPool
from tests.client.processes import Cluster, cluster

SIZE = (100 << 10) + 7
HOLDER = """
import os, sys, time
from kvstore.client import Client
client = Client(sys.argv[1])
for _ in range(3):
    client.put(os.urandom(16), bytes(int(sys.argv[2])))
print("ready", flush=True)
while True:
    client.put(os.urandom(16), bytes(int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.start_node("--dram", "128MiB")
        yield started


@pytest.fixture
def client(running: Cluster) -> Iterator[Client]:
    with Client(running.address) as client:
        client.put(os.urandom(16), b"the first goes the usual way, and opens the connection")
        yield client


class Sent:
    """The messages that the client's channels send, by type."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[type[Message]] = []
        for name in ("call", "call_for_fds"):
            self._note_failure(monkeypatch, name)

    def _note_failure(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(Channel, name)

        def call(channel: Channel, message: Message, *rest: object) -> object:
            self.kinds.append(type(message))
            return real(channel, message, *rest)

        monkeypatch.setattr(Channel, name, call)

    def count(self, kind: type[Message]) -> int:
        return self.kinds.count(kind)


def counters(running: Cluster, number: int = 0) -> dict[str, int]:
    with running.control() as control:
        return dict(control.status().nodes[number].counters)


def put(client: Client, size: int = SIZE) -> tuple[bytes, bytes]:
    key, value = os.urandom(16), os.urandom(size)
    assert client.put(key, value) is True
    return key, value


def test_from_the_third_put_of_a_size_on_each_is_one_message(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    stored = [put(client) for _ in range(2)]
    assert sent.count(OpenSlotAhead) == 2
    sent.kinds.clear()
    stored += [put(client) for _ in range(20)]
    assert {OpenSlotAhead, OpenSlots, CommitPuts}.isdisjoint(sent.kinds)
    assert client.get_batch([key for key, _ in stored]) == [value for _, value in stored]
    client.flush()
    assert all(len(found) == 1 for found in client.locate([key for key, _ in stored]))
    assert client.put(stored[0][0], b"x" * SIZE) is False


@pytest.mark.parametrize("size", [(64 << 10) + 1, 1 << 20, (4 << 20) + 1, MAX_SLOT_AHEAD_BYTES, MAX_SLOT_AHEAD_BYTES + 1])
def test_values_of_any_size_are_what_was_put(client: Client, size: int) -> None:
    stored = [put(client, size) for _ in range(3)]
    assert [client.get(key) for key, _ in stored] == [value for _, value in stored]
    client.remove([key for key, _ in stored])


def test_a_block_that_is_shown_is_not_copied_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = put(client)
    assert client.get(key) == value, "its index is at hand from now on"
    monkeypatch.setattr(MemcpyPool, "gather_and_sum", lambda *_: 1 // 0)
    assert client.put(key, value) is False


@pytest.mark.promise("slots-not-reused-early")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_slots_of_a_client_that_is_killed_come_back(running: Cluster, client: Client, end: signal.Signals) -> None:
    used = _used_bytes(running)
    command = [sys.executable, "-c", HOLDER, running.address, str(4 << 20)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        holder.send_signal(end)
    eventually(lambda: counters(running)["slots_ahead"] == counters(running)["open_puts"] == 0, "the slots are free")
    client.remove_matching(pattern="*", force=True)
    eventually(lambda: _used_bytes(running) <= used, "all is free")


@pytest.mark.promise("slots-not-reused-early")
def test_stopped_writer_keeps_its_slot(tmp_path: Path) -> None:
    """Wherever it is stopped; blocks of others come and go in all of the memory meanwhile."""
    size = 1 << 20
    with cluster(tmp_path) as started:
        started.start_node("--dram", "32MiB")
        command = [sys.executable, "-c", HOLDER, started.address, str(size)]
        with Client(started.address) as client, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            for _ in range(10):
                holder.send_signal(signal.SIGSTOP)
                keys, value = [os.urandom(16) for _ in range(20)], os.urandom(size)
                for key in keys:
                    client.put(key, value)
                holder.send_signal(signal.SIGCONT)
                holder.stdout.flush()
                found = client.get_batch(keys)
                assert set(found) <= {value, None}
            holder.kill()


@pytest.mark.promise("slots-not-reused-early")
def test_a_put_without_room_has_that_of_an_idle_slot(tmp_path: Path) -> None:
    """All else is pinned: 31 of 32 places, and the last one is opened ahead for another client."""
    size = 1 << 20
    with cluster(tmp_path) as started:
        started.start_node("--dram", "32MiB")
        with Client(started.address) as first, Client(started.address) as second:
            keys = [os.urandom(16) for _ in range(31)]
            assert all(second.put_batch(keys[:27], [bytes(size)] * 27))
            second.flush()
            assert all(second.pin(keys[:27]))
            assert all(first.put(key, bytes(size)) for key in keys[27:])
            first.flush()
            assert all(second.pin(keys[27:]))
            assert second.put(b"the last", bytes(size), deadline_s=0.3)


def test_slots_count_for_the_tenants_quota_and_nothing_fails(tmp_path: Path) -> None:
    size = 1 << 20
    with cluster(tmp_path) as started:
        started.start_node("--dram", "64MiB")
        with started.control() as control, Client(started.address, tenant="red") as client:

            def red_bytes() -> int:
                return sum(use.dram_bytes for node in control.status().nodes for use in node.tenants if use.tenant == "red")

            for _ in range(12):
                put(client, size)
            control.set_quota("red", {"dram_bytes": 4 * size})
            eventually(lambda: 0 < red_bytes() <= 4 * size, "the quota is in force")
            last = [put(client, size) for _ in range(8)][-1]
            assert red_bytes() <= 4 * size
            assert client.get(last[0]) == last[1]


def test_a_node_that_hung_up_is_put_to_anew(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "64MiB")
        with Client(started.address, deadline_s=20) as client:
            for _ in range(3):
                put(client)
            node.stop(signal.SIGKILL)
            started.restart_node(0, "--dram", "64MiB")

            def is_put() -> bool:
                try:
                    put(client)
                except Unavailable:
                    return False
                return True

            eventually(is_put, "a put to the node that took the other's place")


def test_signal_during_the_copy_releases_the_slot(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt(BaseException):
        pass

    def strike(*_: object) -> list[int]:
        raise Interrupt

    for _ in range(3):
        put(client)
    with monkeypatch.context() as patch:
        patch.setattr(MemcpyPool, "gather_and_sum", strike)
        with pytest.raises(Interrupt):
            client.put(os.urandom(16), bytes(SIZE))
    key, value = put(client)
    assert client.get(key) == value
    client.flush(deadline_s=Deadline(10).left_s())


def _used_bytes(running: Cluster) -> int:
    with running.control() as control:
        [dram] = [tier for tier in control.status().nodes[0].tiers if tier.name == "dram"]
    return dram.used_bytes
