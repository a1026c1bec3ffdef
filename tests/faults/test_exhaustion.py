"""Nodes and clients at the end of what they may have: descriptors, memory, room. Callers get typed errors in time, and it passes."""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from kvstore.client.sync import Client
from kvstore.protocol.errors import Full, KVStoreError, Retry
from kvstore.testing.transfer.awaited import eventually, within
from tests.system.history import value_of
from tests.system.running import MIB, System, running_system

WRITERS: Final = 64
PUTS: Final = 6
SIZE: Final = 256 << 10
POOL: Final = 4 * MIB
SHORT_S: Final = 0.5


@contextmanager
def limited(pid: int, what: int, limit: int) -> Iterator[None]:
    """A process may have no more of it inside."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


@pytest.mark.promise("resources-exhausted")
def test_64_writers_fill_the_pool_without_open_puts(tmp_path: Path) -> None:
    """They put thirty times the capacity. Each value is right, also in a slot of an evicted block."""
    with running_system(tmp_path, f"--dram {POOL}B") as system:
        stored: list[bytes] = []
        wrong: list[object] = []

        def write(writer: int, client: Client) -> None:
            with client:
                for number in range(PUTS):
                    key = b"%d/%d" % (writer, number)
                    try:
                        if client.put(key, value_of(key, 0, SIZE)):
                            stored.append(key)
                        if client.get(key) not in (None, value_of(key, 0, SIZE)):
                            wrong.append(key)
                    except Full:
                        continue
                    except Exception as error:
                        wrong.append(error)

        makers = [system.client if writer % 2 else system.remote_client for writer in range(WRITERS)]
        clients = [make(ack="node" if writer % 4 == 1 else "cluster") for writer, make in enumerate(makers)]
        threads = [threading.Thread(target=write, args=work) for work in enumerate(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(stored) > POOL // SIZE, "they took turns"
        status = system.await_settled()
        assert status.tiers[0].used_bytes <= POOL
        system.await_counters(open_puts=0, leases=0)
        with system.client() as client:
            kept = [key for key in stored if client.exists(key)]
            assert 0 < len(kept) <= POOL // SIZE
            assert client.get_batch(kept) == [value_of(key, 0, SIZE) for key in kept]


@pytest.mark.promise("resources-exhausted")
def test_node_without_descriptors_serves_existing_clients(system: System) -> None:
    pid = system.nodes["n0"].pid
    with system.client() as client, system.client(deadline_s=SHORT_S) as newcomer:
        client.put(b"k", value_of(b"k", 0, SIZE))
        with limited(pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd"))):
            assert client.get(b"k") == value_of(b"k", 0, SIZE)
            with within(SHORT_S), contextlib.suppress(Retry):
                assert newcomer.get(b"k") in (None, value_of(b"k", 0, SIZE))
            with contextlib.suppress(KVStoreError):  # it may need a further slab
                client.put(b"other", value_of(b"other", 0, MIB), deadline_s=SHORT_S)
        with system.client() as another:
            assert another.get(b"k") == value_of(b"k", 0, SIZE)
            assert another.put(b"afterwards", value_of(b"afterwards", 0, MIB))
            assert another.get(b"afterwards") == value_of(b"afterwards", 0, MIB)


@pytest.mark.promise("resources-exhausted")
def test_client_without_descriptors_fails_and_recovers(system: System) -> None:
    with system.client() as client:
        client.put(b"k", value_of(b"k", 0, SIZE))
        with Client(system.address, deadline_s=SHORT_S) as newcomer:
            with limited(os.getpid(), resource.RLIMIT_NOFILE, 3), within(SHORT_S), pytest.raises(KVStoreError):
                newcomer.get(b"k")
            eventually(lambda: newcomer.get(b"k") == value_of(b"k", 0, SIZE), "it goes on")


@pytest.mark.promise("resources-exhausted")
def test_node_without_memory_refuses_and_recovers(tmp_path: Path) -> None:
    with running_system(tmp_path, "--dram 256MiB") as system:
        pid = system.nodes["n0"].pid
        value = value_of(b"k", 0, SIZE)
        [used_kb] = [int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmSize")]
        with system.client() as client:
            assert client.put(b"k", value)
            assert client.pin([b"k"]) == [True]  # it is not what makes room for others
            assert client.get(b"k") == value  # it has the connections and the index that a get needs
            with limited(pid, resource.RLIMIT_AS, (used_kb << 10) + MIB), system.client(deadline_s=2.0) as short:
                for number in range(40):  # of as many sizes: each wants a slab of its own
                    key = b"more-%d" % number
                    try:
                        short.put(key, value_of(key, 0, SIZE << number % 5))
                    except KVStoreError:
                        continue
                assert client.get(b"k") == value, "who is there is served"
            assert client.put(b"afterwards", value_of(b"afterwards", 0, MIB))
            assert client.get(b"afterwards") == value_of(b"afterwards", 0, MIB)
            system.await_counters(open_puts=0)
