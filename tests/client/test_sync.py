"""The blocking client against real daemons."""

import os
import signal
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.testing.transfer.awaited import eventually, within
from tests.client.behaviour import ClientBehaviour, MakeClient, client, running, where
from tests.client.processes import cluster
from tests.client.scattered import ScatteredBehaviour
from tests.client.standing_by import one_hangs_and_the_other_is_elected

__all__ = ["client", "running", "where"]


@pytest.fixture
def make_client() -> MakeClient:
    return Client


class TestClient(ClientBehaviour):
    pass


class TestClientScattered(ScatteredBehaviour):
    pass


def test_killed_node_misses_until_restarted(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "32MiB")
        with Client(started.address) as client:
            assert client.put_batch([b"small", b"big"], [b"s", b"b" * 100_000]) == [True, True]
            node.stop(signal.SIGKILL)
            assert client.get_batch([b"small", b"big"]) == [None, None]
            with pytest.raises(KVStoreError):
                client.put(b"other", b"x" * 100_000, deadline_s=1.0)
            started.start_node("--dram", "32MiB", "--name", "n0")
            assert client.put(b"again", b"x" * 100_000, deadline_s=10.0)
            assert client.get(b"again") == b"x" * 100_000
            assert client.get(b"big") is None


def test_hanging_node_exceeds_the_deadline_then_recovers(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        node = started.start_node("--dram", "32MiB")
        with Client(started.address) as client:
            client.put(b"k", b"v" * 100_000)
            node.send(signal.SIGSTOP)
            for call in (lambda: client.get(b"k", deadline_s=0.1), lambda: client.put(b"other", b"w" * 100_000, deadline_s=0.1)):
                with within(0.1), pytest.raises(DeadlineExceeded):
                    call()
            node.send(signal.SIGCONT)
            assert client.get(b"k") == b"v" * 100_000


def test_restarted_master_is_found(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        started.start_node("--dram", "32MiB")
        with Client(started.address) as client:
            assert client.put(b"k", b"v" * 100_000)
            started.master.stop(signal.SIGKILL)
            assert client.get(b"k") == b"v" * 100_000  # the place is known, and nodes serve on
            with pytest.raises(Unavailable):
                client.locate([b"k"], deadline_s=1.0)
            started.start_master()
            assert client.exists(b"nowhere") is False


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    with cluster(tmp_path) as started:
        started.start_node("--dram", "32MiB")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with Client(started.address) as client:
                client.put_batch([b"a", b"b"], [b"s", b"v" * 100_000])
                client.get_batch([b"a", b"b"])
                with client.view(b"b"):
                    pass
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "no more descriptors than before")


@pytest.mark.promise("memory-bounded")
def test_memory_of_slabs_that_the_node_has_given_up_is_not_held(tmp_path: Path) -> None:
    """Each size takes slabs of its own, so that all but the last have gone to another size."""

    def mapped_bytes() -> int:
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvstore (" in line]
        spans = [line.split()[0].split("-") for line in lines]
        return sum(int(end, 16) - int(begin, 16) for begin, end in spans)

    before = mapped_bytes()
    with cluster(tmp_path) as started:
        started.start_node("--dram", "8MiB")
        with Client(started.address) as client:
            for size in range(100_000, 1_000_000, 20_000):
                keys = [b"%d %d" % (size, i) for i in range(8)]
                assert all(client.put_batch(keys, [b"x" * size] * 8))
            assert mapped_bytes() - before <= 2 * (8 << 20)


@pytest.mark.promise("failover")
def test_request_to_a_hanging_owner_moves_to_the_new_one() -> None:
    settings = ClientSettings(owner_patience_s=0.5, use_index=False)
    with one_hangs_and_the_other_is_elected() as (hanging, elected):
        with Client([hanging.address, elected.address], deadline_s=60, settings=settings) as client:
            for _ in range(2):
                assert client.exists_batch([b"k"]) == [True]
        assert (len(hanging.asked), elected.hellos, len(elected.asked)) == (1, 3, 2)
