"""Tests of checksums.py and of puts under verification: the loop is not blocked, and puts that end meanwhile leave
nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.protocol.errors import ChecksumMismatch
from kvstore.protocol.node_messages import RETRY_LATER, STORED
from kvstore.store.writes.checksums import AT_ONCE_BYTES, ChecksumVerifier
from kvstore.testing.transfer.awaited import PATIENCE_S
from kvstore.transfer.engine import TransferEngine
from tests.store.engines import LOOPBACK, FarClient
from tests.store.served import Client, Served, in_background, served, until
from tests.store.tables import PUT_TTL_NS

LARGE = b"L" * (AT_ONCE_BYTES + 1)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with TransferEngine("node", LOOPBACK) as engine, served(tmp_path, dram_bytes=8 << 20, engine=engine) as node:
        yield node


@pytest.fixture
def client(node: Served) -> Iterator[Client]:
    client = node.connect(tcp=True)
    yield client
    client.close()


@contextmanager
def held(verifier: ChecksumVerifier) -> Iterator[None]:
    """None of its threads is free inside; afterwards they do what was asked meanwhile."""
    let_go, taken = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        taken.release()
        let_go.wait(PATIENCE_S)

    for _ in range(verifier._threads._max_workers):
        verifier._threads.submit(hold)
    for _ in range(verifier._threads._max_workers):
        assert taken.acquire(timeout=PATIENCE_S)
    try:
        yield
    finally:
        let_go.set()


def free_bytes(node: Served) -> int:
    """Once the slots of puts that have ended are looked at again, as ten times a second."""
    node.store.table.expire(now_ns=0)
    return node.store.dram.free_bytes


def hang_up(node: Served) -> None:
    for session in list(node.server.sessions):
        session.close()


def is_waiting(node: Served) -> bool:
    return node._verifier._threads._work_queue.qsize() > 0


def test_a_damaged_large_value_is_refused(node: Served, client: Client) -> None:
    free = node.call(lambda: node.store.dram.free_bytes)
    with pytest.raises(ChecksumMismatch):
        client.put({"large": LARGE}, checksums=[1])
    assert node.call(lambda: node.store.table.open_puts) == 0
    assert node.call(lambda: node.store.dram.free_bytes) == free
    assert client.put({"large": LARGE}) == [STORED]


@pytest.mark.parametrize("checksums", [(), (1,)], ids=["right", "damaged"])
def test_a_disconnect_during_verification_frees_the_slot(node: Served, client: Client, checksums: tuple[int, ...]) -> None:
    free = node.call(lambda: free_bytes(node))
    with held(node._verifier):
        writer, _ = in_background(lambda: client.put({"large": LARGE}, checksums=checksums))
        until(node, lambda: is_waiting(node))
        node.call(lambda: hang_up(node))
        writer.join()
        assert node.call(lambda: free_bytes(node)) < free, "somebody may be reading its slot"
    until(node, lambda: free_bytes(node) == free)
    other = node.connect()
    assert other.read("large")[1] == [None]
    assert other.put({"large": LARGE}) == [STORED]
    other.close()


def test_a_put_that_expires_during_verification_is_retried(node: Served, client: Client) -> None:
    with held(node._verifier):
        writer, flags = in_background(lambda: client.put({"large": LARGE}))
        until(node, lambda: is_waiting(node))
        assert node.call(lambda: node.store.table.expire(now_ns=node.reactor.now_ns() + PUT_TTL_NS)) == 1
    writer.join()
    assert flags == [[RETRY_LATER]]
    assert client.put({"large": LARGE}) == [STORED]


def test_large_engine_writes_are_verified_in_threads(node: Served, client: Client) -> None:
    assert node.regions is not None
    far = FarClient(node.regions._engine)
    opened = client.open({"right": len(LARGE), "damaged": len(LARGE)}, engine=1)
    for region, value in zip(opened.regions, (LARGE, b"D" + LARGE[1:]), strict=True):
        far.write(far.imported(region), value)
    other = node.connect()
    with held(node._verifier):
        writer, flags = in_background(lambda: client.commit(opened, [LARGE, LARGE]))
        until(node, lambda: is_waiting(node))
        assert other.read("right", "damaged")[1] == [None, None]
    writer.join()
    assert flags == [[STORED, RETRY_LATER]]
    assert other.read("right", "damaged")[1] == [LARGE, None]
    assert node.call(lambda: node.store.table.open_puts) == 0
    other.close()
    far.close()
