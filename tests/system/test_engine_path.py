"""Values between a node and clients of other hosts by the transfer engine, with real processes.

Each read returns the value that was put, while processes die, restart, stall or are unreachable.
"""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client.aio import AsyncClient
from kvstore.client.config import ClientSettings
from kvstore.client.reads import engine_fetch as fetching
from kvstore.client.sync import Client
from kvstore.client.writes import engine_put as by_engine
from kvstore.protocol.errors import Denied, KVStoreError, Retry, StaleHandle
from kvstore.protocol.master_messages import Nodes, NodeTable
from kvstore.protocol.node_messages import (
    MAPPED,
    MISS,
    CommitPuts,
    ExportSlabs,
    ExportSlabsReply,
    OpenSlots,
    OpenSlotsReply,
    ReadBlocks,
    ReadBlocksReply,
)
from kvstore.protocol.session_messages import ROLE_CLIENT, Flags, Hello
from kvstore.protocol.settings import Size
from kvstore.rpc.address import parse_address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.description import unpack_engine, unpack_region
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.paths.batch import Span
from kvstore.transfer.paths.peer import PeerRegion
from tests.credentials import OPERATOR, tokens_file
from tests.rpc.raw_peers import RawAsker, store
from tests.system.history import value_of
from tests.system.running import DEADLINE_S, MIB, System, heard, process, running_system, stopped, until
from tests.tickets import hello_to_node

BY_ENGINE = ClientSettings(engine_min_bytes=Size(1))
RETRY_LATER = 2
TTL_S = 0.3
SIZES = (100, 70_000, 16 << 10, MIB + 3)
KEYS = [b"block-%d" % number for number in range(16)]
VALUES = [value_of(key, 0, SIZES[number % 4]) for number, key in enumerate(KEYS)]
LARGE = sum(len(value) for value in VALUES if len(value) > 16 << 10)
"""Bytes of those that do not come along with a message."""


def far_client(system: System, **options: Any) -> Client:
    """A client that takes itself to be on another host, and has its engine move all but the smallest values."""
    return system.remote_client(**{"settings": BY_ENGINE, **options})


def node_tcp(system: System) -> str:
    return system.node_status().tcp


def engine_of(system: System, tenant: str = "", token: str = "") -> bytes:
    """Return the address of the node's engine, as clients receive it."""
    channel = Channel.open(parse_address(system.address), Hello(ROLE_CLIENT, tenant, token), Deadline(DEADLINE_S))
    with closing(channel):
        return channel.call(Nodes(), NodeTable, Deadline(DEADLINE_S)).transfers[0]


# --- round trips ---


@pytest.mark.promise("get-exact-bytes")
@pytest.mark.promise("put-conflicts")
def test_values_are_equal_for_all_put_and_read_paths(system: System) -> None:
    with system.client() as local, far_client(system) as far, far_client(system) as newcomer:
        assert far.put_batch(KEYS[::2], VALUES[::2]) == [True] * 8
        assert local.put_batch(KEYS[1::2], VALUES[1::2]) == [True] * 8
        assert far.put_batch(KEYS, VALUES) == [False] * 16
        for client in (local, far, newcomer):
            assert client.get_batch([*KEYS, b"nowhere"]) == [*VALUES, None]
        assert newcomer.stats().engine_bytes == LARGE
        assert local.stats().engine_bytes == 0
        buffers = [bytearray(2 * MIB) for _ in KEYS]
        assert newcomer.get_batch_into(KEYS, buffers) == [len(value) for value in VALUES]
        assert all(buffer[: len(value)] == value for buffer, value in zip(buffers, VALUES, strict=True))
        for key, value in zip(KEYS, VALUES, strict=True):
            with newcomer.view(key) as memory:
                assert memory is not None
                assert bytes(memory) == value
    counters = system.await_settled().counters
    assert counters["engine_bytes"] > 2 * LARGE
    until(lambda: system.node_status().counters["leases"] == 0, "no leases")


def test_values_go_straight_into_and_out_of_registered_memory(system: System) -> None:
    pool = np.empty((2, len(KEYS), 2 * MIB), np.uint8)
    with far_client(system) as far, far.register(pool):
        for row, value in zip(pool[0], VALUES, strict=True):
            row[: len(value)] = np.frombuffer(value, np.uint8)
        rows = [row[: len(value)] for row, value in zip(pool[0], VALUES, strict=True)]
        assert far.put_batch(KEYS, rows) == [True] * 16
        assert far.get_batch_into(KEYS, list(pool[1])) == [len(value) for value in VALUES]
        assert all(row[: len(value)].tobytes() == value for row, value in zip(pool[1], VALUES, strict=True))
        assert far.stats().engine_bytes == 2 * LARGE


def test_tasks_share_the_engine_of_an_asyncio_client(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.operations.is_local_socket", lambda unix, host_id: False)

    async def work() -> int:
        async with AsyncClient(system.address, settings=BY_ENGINE) as client:
            stored = await asyncio.gather(*(client.put(key, value) for key, value in zip(KEYS, VALUES, strict=True)))
            assert stored == [True] * 16
            for found in await asyncio.gather(*(client.get_batch(KEYS) for _ in range(8))):
                assert found == VALUES
            async with client.view(KEYS[1]) as memory:
                assert memory is not None
                assert bytes(memory) == VALUES[1]
            return client.stats().engine_bytes

    assert asyncio.run(work()) > 8 * LARGE


def test_no_descriptor_and_no_thread_is_left_behind(system: System) -> None:
    def used() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    def is_left() -> bool:
        return any(now > then for now, then in zip(used(), before, strict=True))

    with far_client(system) as first:
        first.put_batch(KEYS, VALUES)
    before = used()
    for _ in range(5):
        with far_client(system) as far:
            assert far.get_batch(KEYS) == VALUES
    until(lambda: not is_left(), "neither more descriptors nor more threads than before")
    until(lambda: system.node_status().counters["engine_connections"] == 0, "the node's connections are closed too")


# --- what dies ---


@pytest.mark.promise("dead-node")
def test_restarted_node_is_used_by_its_new_engine(tmp_path: Path) -> None:
    with running_system(tmp_path, f"--dram 32MiB --nvme {tmp_path / 'nvme'}:64MiB") as system:
        with far_client(system) as far:
            assert far.put_batch(KEYS, VALUES) == [True] * 16
            assert far.get_batch(KEYS) == VALUES
            before = engine_of(system)
            for _ in range(2):
                system.kill_node()
                system.start_node("n0")
                system.await_alive("n0")
                found = far.get_batch(KEYS)
                assert all(one in (None, value) for one, value in zip(found, VALUES, strict=True))
                far.put_batch(KEYS, VALUES)
                moved = far.stats().engine_bytes
                assert far.get_batch(KEYS) == VALUES
                assert far.stats().engine_bytes == moved + LARGE
            assert unpack_engine(engine_of(system)).name != unpack_engine(before).name


# --- writers that stall or die ---


@pytest.fixture
def small(tmp_path: Path) -> Iterator[System]:
    """A node with room for one value of 1 MiB, and little time for a put."""
    with running_system(tmp_path, f"--dram 1MiB --put-ttl-s {TTL_S}") as started:
        yield started


def hold_remote_put(connection: Connection, tcp: str, engine: bytes, key: bytes) -> None:
    """Open a put as a client of another host, begin to write its slot, say so, and when told to go on write the rest and commit."""
    deadline = Deadline(DEADLINE_S)
    channel = Channel.open(parse_address(tcp), Hello(ROLE_CLIENT), deadline)
    description = unpack_engine(engine)
    [agent] = description.agents
    with RawAsker(agent.metadata) as writer:
        writer.join(key.decode(), secret=description.secret)
        opened = channel.call(OpenSlots("", [key], [MIB], [1], [b""], 1), OpenSlotsReply, deadline)  # last: from here on TTL_S runs
        region = unpack_region(opened.regions[0])
        writer.send(store([(region, 0, MIB)]), b"\xee" * 1000, payload_bytes=MIB, deadline_ms=20_000)
        connection.send("writing")
        connection.recv()
        try:
            writer.socket.sendall(b"\xee" * (MIB - 1000))
            writer.answer()
            ending = "written"
        except OSError:
            ending = "hung up on"
        reply = channel.call(CommitPuts([opened.put_ids[0]], [0]), Flags, deadline)
        connection.send((ending, list(reply.flags)))
        connection.recv()


@pytest.mark.promise("slots-not-reused-early")
def test_late_write_of_expired_put_harms_no_block(small: System) -> None:
    value = value_of(b"k", 1, MIB)
    with small.client() as client, process(hold_remote_put, node_tcp(small), engine_of(small), b"k") as (pid, writer):
        assert heard(writer) == "writing"
        with stopped(pid):
            assert client.put(b"k", value, deadline_s=DEADLINE_S), "though the stopped one still has its connections"
            assert client.get(b"k") == value
        writer.send("go on")
        assert heard(writer) == ("hung up on", [RETRY_LATER])
        assert client.get(b"k") == value
        until(lambda: small.node_status().counters["open_puts"] == 0, "no put is open")


# --- tenants ---

TOKENS = {"red": "red's secret", "blue": "blue's secret"}


@pytest.mark.promise("tenant-isolation")
def test_no_tenant_reads_or_writes_anothers_memory_by_the_engine(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, TOKENS)
    secret, deadline = value_of(b"k", 0, MIB), Deadline(DEADLINE_S)
    with System(tmp_path) as system:
        system.settings = dataclasses.replace(system.settings, token=OPERATOR)
        system.start_master(0, "--tokens", tokens)
        system.start_node("n0", "--dram", "16MiB")
        described = engine_of(system, "red", TOKENS["red"])
        with (
            far_client(system, tenant="red", token=TOKENS["red"]) as red_client,
            far_client(system, tenant="blue", token=TOKENS["blue"]) as blue_client,
            TransferEngine("blue's", TransferSettings(transports="tcp", rails="lo"), serves=False) as engine,
        ):
            assert red_client.put(b"k", secret)
            assert blue_client.get(b"k") is None
            hello = {tenant: hello_to_node(system.address, tenant, TOKENS[tenant]) for tenant in TOKENS}
            red, blue = (Channel.open(parse_address(node_tcp(system)), hello[tenant], deadline) for tenant in ("red", "blue"))
            with closing(red), closing(blue):
                there = red.call(ReadBlocks([b"k"], [0], 0, 10_000, 1), ReadBlocksReply, deadline)
                assert list(there.statuses) == [MAPPED]
                assert list(blue.call(ReadBlocks([b"k"], [0], 0, 10_000, 1), ReadBlocksReply, deadline).statuses) == [MISS]
                asked = ExportSlabs(there.slabs)
                assert blue.call(asked, ExportSlabsReply, deadline).regions == [b""]
                [shown] = red.call(asked, ExportSlabsReply, deadline).regions
                assert shown
                opened = blue.call(OpenSlots("", [b"mine"], [MIB], [1], [b""], 1), OpenSlotsReply, deadline)
                peer = engine.connect(described)
                mine, known = unpack_region(opened.regions[0]), unpack_region(shown)
                # Blue's own key opens nothing of red's, and no more of its slab than its slot.
                for region in (known._replace(key=mine.key), mine._replace(region_id=mine.region_id + 1)):
                    with pytest.raises((Denied, StaleHandle)):
                        engine.transfer([(b"x" * 100, Span(PeerRegion(peer, region)), 100)], deadline_s=5.0)
                    with pytest.raises((Denied, StaleHandle)):
                        engine.transfer([(Span(PeerRegion(peer, region)), bytearray(100), 100)], deadline_s=5.0)
                with pytest.raises(KVStoreError, match="outside region"):
                    beyond = PeerRegion(peer, mine._replace(size_bytes=2 * MIB))
                    engine.transfer([(b"x" * 100, Span(beyond, MIB - 50), 100)], deadline_s=5.0)
            assert red_client.get(b"k") == secret


# --- batches in parts ---


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is a value or two: several are under way in each call."""
    monkeypatch.setattr(by_engine, "PART_BYTES", MIB // 8)
    monkeypatch.setattr(fetching, "SLICE_BYTES", MIB // 8)


@pytest.mark.promise("dead-node")
@pytest.mark.usefixtures("parts")
def test_batches_in_parts_are_the_bytes_that_were_put(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.operations.is_local_socket", lambda unix, host_id: False)

    async def work() -> None:
        async with AsyncClient(system.address, settings=BY_ENGINE) as client:
            assert await client.put_batch(KEYS[8:], VALUES[8:]) == [True] * 8
            assert await client.get_batch(KEYS) == VALUES

    with far_client(system) as far:
        assert far.put_batch(KEYS[:8], VALUES[:8]) == [True] * 8
        asyncio.run(work())
        assert far.get_batch(KEYS) == VALUES
        assert far.put_batch(KEYS, VALUES) == [False] * 16


@pytest.mark.promise("dead-node")
@pytest.mark.usefixtures("parts")
def test_node_killed_between_parts_leaks_no_slot(system: System) -> None:
    """A block that a call reported as stored reads right, or is a miss if the killed node held it."""
    system.start_node("n1", "--dram", "64MiB")
    stored: dict[bytes, bytes] = {}
    with far_client(system, ack="cluster") as far:
        killer = threading.Timer(0.3, system.kill_node)
        killer.start()
        for number in range(40):
            values = {b"%d-%d" % (number, i): value_of(b"%d-%d" % (number, i), 0, 70_000) for i in range(12)}
            try:
                done = far.put_batch(list(values), list(values.values()), deadline_s=DEADLINE_S)
            except Retry:
                continue
            stored |= {key: value for (key, value), is_new in zip(values.items(), done, strict=True) if is_new}
        killer.join()
        found = far.get_batch(list(stored), deadline_s=DEADLINE_S)
        assert all(got in (None, value) for got, value in zip(found, stored.values(), strict=True))
        assert None not in found[-12:], "the last ones are at the other node"
        system.await_counters("n1", open_puts=0)
