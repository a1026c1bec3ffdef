"""Tests of periodic_tasks.py: periodic work continues after an exception in one part."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.protocol.settings import Size
from kvstore.store import periodic_tasks as clockwork
from kvstore.store.block_table.table import BlockTable
from kvstore.store.config import NodeSettings
from kvstore.store.node import Node
from kvstore.testing.transfer.awaited import eventually
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from tests.store.engines import LOOPBACK


@contextmanager
def running(folder: Path, transfer: TransferSettings | None = None) -> Iterator[Node]:
    """A node without a master, its loop in a thread."""
    settings = NodeSettings(
        master=f"unix:{folder}/nobody.sock",
        run_dir=str(folder / "run"),
        dram=Size(1 << 20),
        control_timeout_s=0.1,
        reconnect_interval_s=0.01,
    )
    node = Node(settings, transfer)
    reactor = threading.Thread(target=node.reactor.run)
    try:
        node.start()
        reactor.start()
        yield node
    finally:
        node.reactor.stop()
        reactor.join()
        node.close()


def test_idle_transfer_peers_are_forgotten(tmp_path: Path) -> None:
    with running(tmp_path, TransferSettings(peer_ttl_s=0.001)) as node, TransferEngine("other", LOOPBACK) as other:
        engine = node._storage.engine
        assert engine is not None
        engine.connect(other.describe())
        eventually(lambda: not engine.peers(), "no peer is known")


def test_an_exception_in_one_periodic_task_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    came = threading.Semaphore(0)

    def fail(**_: int) -> None:
        raise RuntimeError("leases cannot be looked at")

    with caplog.at_level(logging.ERROR), running(tmp_path) as node:
        tick = node._metrics.sample

        def measure(table: BlockTable, now_ns: int) -> None:
            """A later part."""
            tick(table, now_ns)
            came.release()

        monkeypatch.setattr(node._storage.leases, "expire", fail)
        monkeypatch.setattr(node._metrics, "sample", measure)
        for _ in range(2):
            assert came.acquire(timeout=60)
    assert "leases cannot be looked at" in caplog.text


def test_local_clients_see_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came = threading.Semaphore(0)
    with running(tmp_path) as node:
        beat = node._storage.shared_index.heartbeat

        def heard(now_ns: int) -> bool:
            came.release()
            return beat(now_ns)

        monkeypatch.setattr(node._storage.shared_index, "heartbeat", heard)
        for _ in range(3):
            assert came.acquire(timeout=60)


def test_long_heartbeat_work_leaves_the_loop_responsive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes longer than the interval, so the timer fires in every round too."""
    rounds, beats = [0], [0]
    over = threading.Event()
    monkeypatch.setattr(clockwork, "HEARTBEAT_INTERVAL_S", 1e-6)
    with running(tmp_path) as node:

        def beat(now_ns: int) -> bool:
            beats[0] += 1
            return True

        def count() -> None:
            rounds[0] += 1
            if rounds[0] == 100:
                over.set()

        def begin() -> None:
            monkeypatch.setattr(node._storage.shared_index, "heartbeat", beat)
            node.reactor.after_events.append(count)

        node.reactor.call(begin, deadline_s=60)
        assert over.wait(60)
    assert beats[0] / rounds[0] < 3
