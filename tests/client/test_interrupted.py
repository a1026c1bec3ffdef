"""Calls interrupted by signals or cancelled leave nothing behind. Leases, puts and reservations that leak would last an
hour here."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import AsyncClient, Client
from kvstore.client.control import Control
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster
from tests.line_child import LineChild
from tests.signals import Struck

SIGNALS = 900
LONG = ("--max-lease-s", "3600", "--put-ttl-s", "3600")


def until_nothing_is_reserved(control: Control) -> None:
    eventually(lambda: not control.status().reserved, "nothing is reserved")


def until_all_is_free(control: Control) -> None:
    """The node says so with its next report."""

    def is_free() -> bool:
        [node] = control.status().nodes
        return not any(tier.used_bytes or tier.quarantined_bytes for tier in node.tiers)

    eventually(is_free, "no tier has bytes in use")


@pytest.mark.promise("interrupts-safe")
@pytest.mark.parametrize(("where", "signals"), [("here", SIGNALS), ("elsewhere", SIGNALS // 3)])
def test_raising_signals_leak_nothing(tmp_path: Path, where: str, signals: int) -> None:
    with cluster(tmp_path, "--reserve-ttl-s", "3600") as started:
        started.start_node("--dram", "128MiB", *LONG)
        with LineChild("tests.client.struck_client", started.address, str(signals), where) as child, started.control() as control:
            struck, wrong, lent = child.answer()
            assert struck >= signals
            assert (wrong, lent) == (0, 0)
            until_nothing_is_reserved(control)
            with Client(started.address) as client:
                client.remove([key for key, _, _ in iter(control.keys())])
            until_all_is_free(control)


@pytest.mark.promise("interrupts-safe")
def test_cancelled_puts_give_back_what_they_had_reserved(tmp_path: Path) -> None:
    async def main(address: str, control: Control) -> None:
        async with AsyncClient(address) as client:
            await client.put(b"first", b"x" * 100_000)
            for steps in range(40):
                keys = [b"%d %d" % (steps, i) for i in range(3)]
                put = asyncio.create_task(client.put_batch(keys, [b"y" * 100_000] * 3, ack="cluster"))
                for _ in range(steps // 2):
                    await asyncio.sleep(0)
                put.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await put
            await asyncio.to_thread(until_nothing_is_reserved, control)

    with cluster(tmp_path, "--reserve-ttl-s", "3600") as started, started.control() as control:
        started.start_node("--dram", "64MiB")
        asyncio.run(main(started.address, control))


KEYS, VALUES = [b"%d" % i for i in range(3)], [b"y" * 100_000] * 3


@contextlib.contextmanager
def node_that_stopped(folder: Path) -> Iterator[tuple[Cluster, Control]]:
    """Puts for the cluster are granted by the master, and then wait for the node."""
    with cluster(folder, "--reserve-ttl-s", "3600") as started, started.control() as control:
        started.start_node("--dram", "64MiB")
        with Client(started.address) as client:
            client.put(b"first", b"x" * 100_000, ack="cluster")
        started.nodes[0].send(signal.SIGSTOP)
        try:
            yield started, control
        finally:
            started.nodes[0].send(signal.SIGCONT)


def until_all_is_reserved(control: Control) -> None:
    eventually(lambda: control.status().reserved == len(KEYS), "the master has granted the put")


@pytest.mark.promise("interrupts-safe")
def test_cancelled_put_cancels_its_reservations(tmp_path: Path) -> None:
    async def main(address: str, control: Control) -> None:
        async with AsyncClient(address, deadline_s=3600) as client:
            put = asyncio.create_task(client.put_batch(KEYS, VALUES, ack="cluster"))
            await asyncio.to_thread(until_all_is_reserved, control)
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            await asyncio.to_thread(eventually, lambda: not control.status().reserved, "nothing is reserved")

    with node_that_stopped(tmp_path) as (started, control):
        asyncio.run(main(started.address, control))


@pytest.mark.promise("interrupts-safe")
def test_interrupted_put_cancels_its_reservations(tmp_path: Path) -> None:
    def strike(number: int, frame: object) -> None:
        raise Struck

    def strike_once_granted() -> None:
        until_all_is_reserved(control)
        os.kill(os.getpid(), signal.SIGUSR1)

    with node_that_stopped(tmp_path) as (started, control), Client(started.address, deadline_s=3600) as client:
        before = signal.signal(signal.SIGUSR1, strike)
        striker = threading.Thread(target=strike_once_granted)
        striker.start()
        try:
            with pytest.raises(Struck):
                client.put_batch(KEYS, VALUES, ack="cluster")
        finally:
            striker.join()
            signal.signal(signal.SIGUSR1, before)
        eventually(lambda: not control.status().reserved, "nothing is reserved")
