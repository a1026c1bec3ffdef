"""Lock-free local reads against a running node: no message for local blocks, ordinary reads for the rest."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvstore.client import AsyncClient, Client
from kvstore.client.async_driver import INLINE_WORK_BYTES
from kvstore.client.config import ClientSettings
from kvstore.client.local import reads
from kvstore.client.reads import mapped_values as mapped
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster
from tests.forks import told_by_child

SIZES = [1, 100, 4096, 70_000, 3 << 20]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        # By lru, for the default policy learns from what the tests read, and keeps such blocks in DRAM through gigabytes of others.
        started.start_node("--dram", "64MiB", "--nvme", f"{tmp_path_factory.mktemp('nvme')}:64MiB", "--policy", "lru")
        yield started


@pytest.fixture
def client(running: Cluster) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client


def stored(client: Any, sizes: list[int] = SIZES) -> tuple[list[bytes], list[bytes]]:
    """Keys and values, and the client has found its way to the node."""
    keys, values = [os.urandom(16) for _ in sizes], [os.urandom(size) for size in sizes]
    client.put_batch(keys, values)
    eventually(lambda: client.get_batch(keys) == values and bool(client._operations.local.ready), "the node's index to be read")
    return keys, values


@pytest.fixture(params=[0, 1000], ids=["by columns", "one by one"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which the keys of a batch are looked up."""
    monkeypatch.setattr(reads, "FEW_KEYS", request.param)
    monkeypatch.setattr(reads, "FEW_EXISTS_KEYS", request.param)


class Requests:
    """Counts the effects of a client that send messages."""

    def __init__(self, client: Any) -> None:
        self.count = 0
        real = client._driver._do

        def do(effect: Any) -> Any:
            self.count += type(effect).__name__ in (
                "RequestEffect",
                "AcquireConnectionEffect",
                "RequestFdsEffect",
                "ReadPayloadEffect",
                "SendOneWayEffect",
            )
            return real(effect)

        client._driver._do = do


@pytest.mark.usefixtures("ways")
def test_what_is_here_is_read_without_a_message(client: Client) -> None:
    keys, values = stored(client)
    requests = Requests(client)
    assert [client.get(key) for key in keys] == values
    assert client.get_batch(keys) == values
    buffers = [bytearray(len(value) + 3) for value in values]
    assert client.get_batch_into(keys, buffers) == SIZES
    assert [bytes(buffer[:-3]) for buffer in buffers] == values
    for key, value in zip(keys, values, strict=True):
        buffer = bytearray(len(value))
        assert client.get_into(key, buffer) == len(value)
        assert buffer == value
        with client.view(key) as memory:
            assert memory is not None
            assert memory.readonly
            assert bytes(memory) == value
        assert client.exists(key)
    assert client.exists_batch(keys) == [True] * len(keys)
    assert client.match_prefix(keys) == len(keys)
    assert requests.count == 0


Call = Callable[[AsyncClient, bytes], Coroutine[Any, Any, bytes]]


async def into_buffer(client: AsyncClient, key: bytes) -> bytes:
    buffer = bytearray(INLINE_WORK_BYTES + 1)
    assert await client.get_into(key, buffer) == len(buffer)
    return bytes(buffer)


async def in_few(client: AsyncClient, key: bytes) -> bytes:
    return (await client.get_batch([key, b"none"]))[0] or b""


async def in_batch(client: AsyncClient, key: bytes) -> bytes:
    return (await client.get_batch([key, *(b"none %d" % number for number in range(reads.FEW_KEYS))]))[0] or b""


async def in_view(client: AsyncClient, key: bytes) -> bytes:
    async with client.view(key) as memory:
        return bytes(memory or b"")


async def in_range(client: AsyncClient, key: bytes) -> bytes:
    buffer = bytearray(INLINE_WORK_BYTES + 1)
    assert await client.get_ranges_into([key], [0], [buffer]) == [len(buffer)]
    return bytes(buffer)


@pytest.mark.parametrize("uses_index", [True, False], ids=["without asking", "asking"])
@pytest.mark.parametrize("call", [AsyncClient.get, into_buffer, in_few, in_batch, in_view, in_range])
def test_asyncio_client_copies_large_values_in_threads(
    running: Cluster, monkeypatch: pytest.MonkeyPatch, call: Call, uses_index: bool
) -> None:
    threads: list[int] = []

    def noted(work: Callable[..., object]) -> Callable[..., object]:
        def do(*arguments: Any) -> object:
            threads.append(threading.get_ident())
            return work(*arguments)

        return do

    async def main() -> None:
        async with AsyncClient(running.address, settings=ClientSettings(verify_all=True, use_index=uses_index)) as client:
            key, value = os.urandom(16), os.urandom(INLINE_WORK_BYTES + 1)
            await client.put(key, value, ack="cluster")
            assert await call(client, key) == value
            for module, name in ((reads, "_checksum"), (reads, "checksum_of"), (mapped, "checksum")):
                monkeypatch.setattr(module, name, noted(getattr(module, name)))
            copier = client._operations.local_reads._copier
            for name in ("copy", "scatter"):
                monkeypatch.setattr(copier, name, noted(getattr(copier, name)))
            assert await call(client, key) == value

    asyncio.run(main())
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.usefixtures("ways")
def test_misses_are_asked_for_in_one_message_and_hits_are_not(client: Client) -> None:
    keys, values = stored(client, [1000] * 4)
    client.flush()  # else the first miss would wait for these
    other = [os.urandom(16) for _ in range(3)]
    requests = Requests(client)
    assert client.get_batch([*other, *keys]) == [None] * 3 + values
    assert client.exists_batch([keys[0], *other]) == [True, False, False, False]
    assert client.match_prefix([*keys, *other]) == 4
    assert client.match_prefix([*other, *keys]) == 0
    assert client.get(other[0]) is None
    assert not client.exists(other[0])
    assert requests.count == 2 * 6  # a Take and an Ask each


@pytest.mark.promise("remove-stays-removed")
@pytest.mark.usefixtures("ways")
def test_a_removed_block_is_gone_for_every_client(client: Client, running: Cluster) -> None:
    keys, values = stored(client, [100, 100])
    with Client(running.address) as other:
        assert other.get_batch(keys) == values
        assert client.remove([keys[0]]) == 1
        for one in (client, other):
            assert one.get(keys[0]) is None
            assert not one.exists(keys[0])
            assert one.match_prefix(keys) == 0
            assert one.get_batch(keys) == [None, values[1]]
        client.put(keys[0], b"another")
        assert other.get(keys[0]) == b"another"


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("call", ["get", "get_into", "get_batch", "get_batch_into"])
def test_what_left_while_it_was_copied_is_not_returned(
    client: Client, running: Cluster, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [key], [value] = stored(client, [3 << 20])
    buffer, copier = bytearray(len(value)), client._operations.local_reads._copier
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: client.get(key),
        "get_into": lambda: client.get_into(key, buffer),
        "get_batch": lambda: client.get_batch([key])[0],
        "get_batch_into": lambda: client.get_batch_into([key], [buffer])[0],
    }
    assert calls[call]() in (value, len(value))
    has_left: list[bool] = []
    results: list[object] = []

    with Client(running.address) as other:

        def and_it_leaves(copy: Callable[[Any], None]) -> Callable[[Any], None]:
            def do(pairs: Any) -> None:
                copy(pairs)
                has_left.append(other.remove([key]) == 1)
                other.put(os.urandom(16), os.urandom(len(value)))

            return do

        def read_here() -> bool:
            results.append(calls[call]())
            return any(has_left)  # else it was read by message, under a lease, since the node had not said for a while that it lives

        monkeypatch.setattr(copier, "copy", and_it_leaves(copier.copy))
        monkeypatch.setattr(copier, "scatter", and_it_leaves(copier.scatter))
        eventually(read_here, "that it is read here")
    assert results[-1] is None


@pytest.mark.promise("shm-reads-whole")
def test_what_is_being_looked_at_is_not_removed_but_by_force(client: Client, running: Cluster) -> None:
    keys, values = stored(client, [100_000])
    client.flush()  # else the other client's remove may come before the master knows the block
    with Client(running.address) as other, client.view(keys[0]) as memory:
        assert other.remove(keys) == 0
        assert other.remove(keys, force=True) == 1
        for _ in range(3):
            other.put(os.urandom(16), os.urandom(100_000))
        assert memory is not None
        assert bytes(memory) == values[0]
    assert client.get(keys[0]) is None


@pytest.mark.usefixtures("ways")
def test_reads_count_as_hits_here_and_at_the_node(client: Client, running: Cluster) -> None:
    keys, _ = stored(client, [1000] * 3)
    with running.control() as control:

        def hits() -> int:
            return sum(tier.hits for node in control.status().nodes for tier in node.tiers if tier.name == "dram")

        eventually(lambda: hits() == hits(), "settled")
        before, mine = hits(), client.stats()
        client.get(keys[0])
        client.get_batch(keys)
        with client.view(keys[1]):
            pass
        now = client.stats()
        assert (now.requests - mine.requests, now.hits - mine.hits, now.bytes_in - mine.bytes_in) == (3, 5, 5000)
        assert now.hits_by_tier["dram"] - mine.hits_by_tier["dram"] == 5
        eventually(lambda: hits() >= before + 5, "the node has counted them")


def test_a_forked_child_reads_nothing(client: Client) -> None:
    keys, values = stored(client, [100])
    for call in (lambda: client.get(keys[0]), lambda: client.exists(keys[0]), lambda: client.match_prefix(keys)):
        assert told_by_child(call) == "Forked"
    assert client.get(keys[0]) == values[0]


@pytest.mark.promise("remove-stays-removed")
def test_a_node_that_died_is_read_no_more(tmp_path: Any) -> None:
    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "32MiB")
        with Client(started.address) as client:
            keys, values = stored(client)
            with client.view(keys[0]) as memory:
                node.stop(signal.SIGKILL)
                eventually(lambda: not client._operations.local.fresh(), "noticed")
                assert client.get(keys[0]) is None
                assert memory is not None
                assert bytes(memory) == values[0]  # its pages live as long as they are mapped
            started.start_node("--dram", "32MiB")
            eventually(lambda: _puts(client, keys, values), "the new one takes puts")
            eventually(lambda: client.get_batch(keys) == values and bool(client._operations.local.fresh()), "and is read")


def _puts(client: Client, keys: list[bytes], values: list[bytes]) -> bool:
    try:
        client.put_batch(keys, values)
    except (Unavailable, DeadlineExceeded):
        return False
    return True


@pytest.mark.promise("remove-stays-removed")
def test_a_node_that_stopped_is_not_believed_for_long(tmp_path: Any) -> None:
    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "32MiB")
        with Client(started.address) as client:
            keys, values = stored(client)
            node.send(signal.SIGSTOP)
            eventually(lambda: not client._operations.local.fresh(), "its heartbeat is old")
            with pytest.raises(DeadlineExceeded):
                client.get(keys[0], deadline_s=0.2)
            node.send(signal.SIGCONT)
            eventually(lambda: bool(client._operations.local.fresh()), "its heart beats")
            assert client.get_batch(keys) == values


def test_stopped_node_costs_a_share_of_the_deadline(tmp_path: Any) -> None:
    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "64MiB")
        with Client(started.address) as writer:
            writer.put(b"key", b"value", ack="cluster")
        node.send(signal.SIGSTOP)
        try:
            for call in ("exists", "exists_batch"):
                with Client(started.address) as client:
                    begun_s = time.monotonic()
                    assert getattr(client, call)(b"key" if call == "exists" else [b"key"], deadline_s=60) in (True, [True])
                    assert time.monotonic() - begun_s < 30
                    assert not client.exists(b"another", deadline_s=60), "it is not tried again at once"
        finally:
            node.send(signal.SIGCONT)


def test_a_call_that_has_no_time_for_an_answer_ends_no_view(tmp_path: Any) -> None:
    """Its deadline or cancellation does not close the connection of the reader slots, which would end every view."""

    async def play(address: str) -> None:
        async with AsyncClient(address) as client:
            await client.put(b"seen", b"s" * 100_000)
            while await client.get(b"seen") is None or not client._operations.local.ready:
                await asyncio.sleep(0.001)
            with Client(address) as writer:
                writer.put(b"elsewhere", b"e" * (1 << 20), ack="cluster")
            async with client.view(b"seen"):
                [attached] = client._operations.local.ready
                node.send(signal.SIGSTOP)
                with pytest.raises(DeadlineExceeded):
                    await client.get(b"elsewhere", deadline_s=0.002)
                getting = asyncio.ensure_future(client.get(b"elsewhere", deadline_s=60))
                await asyncio.sleep(0.002)
                getting.cancel()
                await asyncio.wait([getting])
                node.send(signal.SIGCONT)
                assert await client.get(b"elsewhere", deadline_s=60) == b"e" * (1 << 20)
                assert client._operations.local.ready == (attached,)
                assert not attached.is_lost

    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "64MiB")
        try:
            asyncio.run(play(started.address))
        finally:
            node.send(signal.SIGCONT)


@pytest.mark.promise("shm-reads-whole")
def test_a_client_that_died_while_it_looked_holds_nothing(tmp_path: Any) -> None:
    with cluster(tmp_path) as started:
        started.start_node("--dram", "32MiB")
        with Client(started.address) as client, started.control() as control:
            keys, _ = stored(client, [100_000])
            ready, waiting = os.pipe()
            child = os.fork()
            if not child:
                try:
                    with Client(started.address) as mine, mine.view(keys[0]):
                        os.write(waiting, b"x")
                        time.sleep(600)
                finally:
                    os._exit(1)
            os.close(waiting)
            with open(ready, "rb") as pipe:
                assert pipe.read(1) == b"x"
            client.remove(keys, force=True)

            def quarantined() -> int:
                return sum(tier.quarantined_bytes for node in control.status().nodes for tier in node.tiers)

            eventually(lambda: quarantined() == 100_000, "the child looks at it")
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            eventually(lambda: quarantined() == 0, "nobody looks at it")


def seen(client: Client, key: bytes) -> bool:
    with client.view(key) as view:
        return view is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda client, key: client.get(key),
        lambda client, key: client.get_into(key, bytearray(100)),
        lambda client, key: client.exists(key),
        seen,
        lambda client, key: client.get_batch([key]),
        lambda client, key: client.match_prefix([key]),
    ],
)
def test_every_call_finds_a_replaced_index(running: Cluster, call: Callable[[Client, bytes], object]) -> None:
    with Client(running.address, tenant=os.urandom(4).hex()) as client:
        keys, _ = stored(client, [100])
        [node] = client._operations.local.ready
        before = node.index
        while not before.is_over:
            client.put_batch([os.urandom(16) for _ in range(500)], [b"v"] * 500)
        eventually(lambda: call(client, keys[0]) is not None and node.index is not before, "the larger one is used")
        assert node.index.find(keys[0]) is not None


def test_slabs_that_the_node_gave_up_are_unmapped(tmp_path: Any) -> None:
    with cluster(tmp_path) as started:
        started.start_node("--dram", "16MiB")
        with Client(started.address) as client:
            seen: set[int] = set()
            for size in range(100_000, 1_000_000, 60_000):
                keys = [os.urandom(16) for _ in range(12_000_000 // size)]
                client.put_batch(keys, [b"v" * size] * len(keys))
                assert client.get_batch(keys[-3:]) == [b"v" * size] * 3
                seen |= set(client._operations.local.ready[0].slabs)
            local = client._operations.local

            def is_caught_up() -> bool:
                client.get(keys[-1])
                return local.ready[0].slabs_gone == local.ready[0].index.slabs_gone

            eventually(is_caught_up, "it has asked what became of its slabs")
            assert len(local.ready[0].slabs) < len(seen)
            mapped = sum(len(memory) for memory in local.ready[0].slabs.values())
            assert mapped <= 2 * (16 << 20)
