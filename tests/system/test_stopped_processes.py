"""Processes stopped with SIGSTOP, as in a frozen container: no process waits for them for ever, and they do no harm afterwards."""

import mmap
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvstore.client.local.fast_puts import OfferedSlot
from kvstore.client.sync import Client
from kvstore.protocol.errors import DeadlineExceeded, LeaseExpired, Unavailable
from kvstore.protocol.node_messages import CommitPuts, MapSlabs, MapSlabsReply, OpenSlotAhead, OpenSlots, OpenSlotsReply
from kvstore.protocol.session_messages import ROLE_CLIENT, Flags, Hello
from kvstore.rpc.address import Address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import within
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, MIB, System, heard, process, running_system, stopped, until

RETRY_LATER = 2
TTL_S = 0.3
BLOCKS = 4


@pytest.fixture
def small(tmp_path: Path) -> Iterator[System]:
    """A node with DRAM for BLOCKS blocks of 1 MiB and short leases; no lower tier."""
    with running_system(tmp_path, f"--dram {BLOCKS}MiB --put-ttl-s {TTL_S} --max-lease-s {TTL_S}") as started:
        yield started


def hold_views(connection: Connection, address: str, keys: list[bytes]) -> None:
    """Open a view of each key, say so, and when told to go on say how the views ended."""
    with Client(address) as client:
        views = [client.view(key) for key in keys]
        assert all(view.__enter__() is not None for view in views)
        connection.send("holding")
        connection.recv()
        expirations = []
        for view in views:
            try:
                view.__exit__(None, None, None)
                expirations.append("in time")
            except LeaseExpired:
                expirations.append("lease expired")
    connection.send(expirations)


def hold_put(connection: Connection, unix: str, key: bytes) -> None:
    """Open a put and map its slot, say so, and when told to go on scribble over it and say what the commit gave."""
    deadline = Deadline(DEADLINE_S)
    channel = Channel.open(Address(unix=unix), Hello(ROLE_CLIENT), deadline)
    opened = channel.call(OpenSlots("", [key], [MIB], [1], [b""]), OpenSlotsReply, deadline)
    answer, [fd] = channel.call_for_fds(MapSlabs([opened.slabs[0]], 1), deadline)
    assert isinstance(answer, MapSlabsReply)
    slab = mmap.mmap(fd, answer.sizes[0])
    os.close(fd)
    connection.send("holding")
    connection.recv()
    slab[opened.offsets[0] : opened.offsets[0] + MIB] = b"\xee" * MIB
    reply = channel.call(CommitPuts([opened.put_ids[0]], [0]), Flags, deadline)
    connection.send(list(reply.flags))
    connection.recv()


def write_behind(connection: Connection, unix: str, key: bytes, is_ahead: bool) -> None:
    """Get a slot, by Open or opened ahead, and send garbage so that the node closes the connection. On request, write to the slot."""
    deadline = Deadline(DEADLINE_S)
    channel = Channel.open(Address(unix=unix), Hello(ROLE_CLIENT), deadline)
    if is_ahead:
        answer, [page] = channel.call_for_fds(OpenSlotAhead(MIB), deadline)
        entered = OfferedSlot(page, answer.sizes[0]).enter(MIB)
        assert entered is not None
        slab_id, offset = entered[1:]
    else:
        opened = channel.call(OpenSlots("", [key], [MIB], [1], [b""]), OpenSlotsReply, deadline)
        slab_id, offset = opened.slabs[0], opened.offsets[0]
    answer, [fd] = channel.call_for_fds(MapSlabs([slab_id], 1), deadline)
    slab = mmap.mmap(fd, answer.sizes[0])
    sock = channel.detach()
    sock.sendall(b"nonsense" * 8)
    while sock.recv(1 << 16):
        pass
    connection.send("hung up")
    connection.recv()
    slab[offset : offset + MIB] = b"\xee" * MIB
    connection.send("written")
    connection.recv()
    sock.close()
    connection.send("closed")
    connection.recv()


@pytest.mark.promise("slots-not-reused-early")
@pytest.mark.parametrize("is_ahead", [False, True])
def test_writer_that_was_hung_up_on_writes_into_no_other_block(tmp_path: Path, is_ahead: bool) -> None:
    """The node ended the connection; the writer, which a stop held up in the middle of its copy, goes on later. Its slot is another block's
    only once its end of the connection is closed."""
    flags = ("--dram", "64MiB", "--put-ttl-s", str(TTL_S))  # of which slots ahead take a sixteenth
    keys = [b"other-%d" % number for number in range(128)]
    with System(tmp_path) as system:
        system.start_master()
        system.start_node("n0", *flags)
        unix = system.nodes["n0"].facts("serving", deadline_s=DEADLINE_S)["unix"]

        def fill(client: Client) -> list[bytes]:
            """Put twice as much as there is room for, once nothing else is there; the blocks that stay."""
            client.remove_matching(pattern="*", force=True)
            for key in keys:
                assert client.put(key, value_of(key, 0, MIB))
            kept = [key for key in keys if client.exists(key)]
            assert client.get_batch(kept) == [value_of(key, 0, MIB) for key in kept]
            return kept

        with system.client(deadline_s=DEADLINE_S) as client, process(write_behind, unix, b"late", is_ahead) as (_pid, writer):
            assert heard(writer) == "hung up"
            kept = fill(client)
            writer.send("go on")
            assert heard(writer) == "written"
            assert client.get_batch(kept) == [value_of(key, 0, MIB) for key in kept]
            writer.send("close")
            assert heard(writer) == "closed"
            until(lambda: len(fill(client)) > len(kept), "the slot serves others once its writer is gone")


@pytest.mark.promise("slots-not-reused-early")
def test_leases_of_a_stopped_client_end_and_it_is_told_so(small: System) -> None:
    keys = [b"held-%d" % number for number in range(BLOCKS)]
    with small.client() as client:
        client.put_batch(keys, [value_of(key, 0, MIB) for key in keys])
        with process(hold_views, small.address, keys) as (pid, holder):
            assert heard(holder) == "holding"
            with stopped(pid):
                assert client.put(b"other", value_of(b"other", 0, MIB)), "all room was leased until the leases ended"
                assert client.get(b"other") == value_of(b"other", 0, MIB)
            holder.send("go on")
            assert heard(holder) == ["lease expired"] * BLOCKS
        until(lambda: small.node_status().counters["leases"] == 0, "no leases")


@pytest.mark.promise("slots-not-reused-early")
def test_stopped_client_put_expires_and_late_write_is_safe(small: System) -> None:
    key, others = b"contested", [b"other-%d" % number for number in range(3 * BLOCKS)]
    unix = small.nodes["n0"].facts("serving", deadline_s=DEADLINE_S)["unix"]
    with small.client() as client, process(hold_put, unix, key) as (pid, writer):
        assert heard(writer) == "holding"
        with stopped(pid):
            assert client.put(key, value_of(key, 1, MIB)), "once the open put of the stopped client had expired"
            assert all(client.put(other, value_of(other, 0, MIB)) for other in others)
            assert client.get(others[-1]) == value_of(others[-1], 0, MIB)
        writer.send("go on")
        assert heard(writer) == [RETRY_LATER]
        kept = [name for name in [key, *others] if client.exists(name)]
        assert len(kept) == BLOCKS - 1, "all room but the stopped writer's slot"
        assert client.get_batch(kept) == [value_of(name, int(name == key), MIB) for name in kept]
        until(lambda: small.node_status().counters["open_puts"] == 0, "no put is open")  # by what the node told last


def ends_in_time(call: Callable[[], object], deadline_s: float) -> None:
    with within(deadline_s), pytest.raises((DeadlineExceeded, Unavailable)):
        call()


@pytest.mark.promise("failures-typed")
@pytest.mark.parametrize("way", ["shared memory", "TCP"])
def test_stopped_node_fails_calls_by_deadline_then_serves(system: System, way: str) -> None:
    keys = [b"small", b"large"]
    values = [value_of(b"small", 0, 100), value_of(b"large", 0, MIB)]
    with system.client() if way == "shared memory" else system.remote_client() as client:
        client.put_batch(keys, values)
        with stopped(system.nodes["n0"].pid):
            for key, value in zip(keys, values, strict=True):
                ends_in_time(lambda key=key: client.get(key, deadline_s=0.2), 0.2)  # type: ignore[misc]
                ends_in_time(lambda key=key, value=value: client.put(b"new " + key, value, deadline_s=0.2), 0.2)  # type: ignore[misc]
            assert client.exists_batch(keys) == [True, True]
        system.await_alive("n0")
        assert client.get_batch(keys) == values
        assert client.put(b"afterwards", values[1])


@pytest.mark.promise("heals")
def test_node_stopped_beyond_its_ttl_is_dead_then_alive(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master(0, "--node-ttl-s", "1.5")  # a busy machine may keep a node from its heartbeat for a part of it
        system.start_node("n0", "--dram", "8MiB")
        with system.client() as client:
            client.put(b"k", value_of(b"k", 0, MIB))
            assert client.get(b"k") == value_of(b"k", 0, MIB), "and it knows the node: else its next call would wait for it"
            with stopped(system.nodes["n0"].pid):
                until(lambda: not client.exists(b"k"), "a silent node's blocks are misses")
            until(lambda: client.get(b"k") == value_of(b"k", 0, MIB), "it lives again")


@pytest.mark.promise("failures-typed")
def test_stopped_master_fails_calls_by_deadline_then_serves(system: System) -> None:
    with system.client() as client:
        client.put(b"k", value_of(b"k", 0, MIB))
        with stopped(system.masters[0].pid):
            assert client.get(b"k") == value_of(b"k", 0, MIB), "its place is known"
            ends_in_time(lambda: client.exists(b"another", deadline_s=0.2), 0.2)
            ends_in_time(lambda: client.put(b"new", b"value", deadline_s=0.2), 0.2)
        assert client.exists(b"k") is True
        assert client.put(b"new", b"value", deadline_s=DEADLINE_S) in (True, False)
        assert client.get(b"new") == b"value"
