"""Holds, with real processes: what a lookup found is there until it was loaded, however much others put meanwhile."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client.holds import new_hold
from kvstore.client.sync import Client
from tests.system.history import value_of
from tests.system.running import STATUS_POLL_S, System, running_system, until

BLOCK_BYTES = 64 << 10
DRAM_BYTES = 64 << 20
TENTH_BLOCKS = DRAM_BYTES // 10 // BLOCK_BYTES
"""As many as may be held."""
HELD = [b"held-%d" % number for number in range(64)]
UNHELD = [b"unheld-%d" % number for number in range(64)]
LONG_S = 60.0
"""No test lasts as long."""
SHORT_S = 2.0
LOADER = """
import pickle, sys
from kvstore.client import Client
address, keys, size_bytes = pickle.loads(bytes.fromhex(sys.argv[1]))
with Client(address) as client:
    found = client.get_batch(keys, deadline_s=60)
sys.stdout.buffer.write(pickle.dumps(found))
"""
HOLDER = """
import os, signal, sys, pickle
from kvstore.client import Client, new_hold
address, keys = pickle.loads(bytes.fromhex(sys.argv[1]))
client = Client(address)
client.exists(keys[0])
print(client.match_prefix(keys, hold=new_hold(60), deadline_s=60), flush=True)
signal.pause()
"""


def values(keys: list[bytes]) -> list[bytes]:
    return [value_of(key, 0, BLOCK_BYTES) for key in keys]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[System]:
    """A node with room for 1,024 blocks."""
    with running_system(tmp_path, "--dram 64MiB --policy lru") as system:
        yield system


@pytest.fixture(params=["here", "elsewhere"])
def make_client(small: System, request: pytest.FixtureRequest) -> Callable[[], Client]:
    """Lookups go through shared memory, or by messages."""
    return small.client if request.param == "here" else small.remote_client


HERE = pytest.mark.parametrize("make_client", ["here"], indirect=True)
"""Cases that concern the node only, independent of the client's transport."""


class Writer:
    """Puts blocks in its own thread, again and again, so that all that may leave the node does."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._put = 0

    def _run(self) -> None:
        value = b"w" * BLOCK_BYTES
        while not self._is_over.is_set():
            keys = [b"written-%d" % number for number in range(self._put, self._put + 32)]
            self._client.put_batch(keys, [value] * 32)
            self._put += 32

    def turn_over(self) -> None:
        """Wait until what was there twice over has been put once more."""
        enough = self._put + 2 * DRAM_BYTES // BLOCK_BYTES
        until(lambda: self._put > enough, "the writer has filled the node twice")

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def writing(system: System) -> Iterator[Writer]:
    with system.client() as client, Writer(client) as writer:
        yield writer


def counters(system: System) -> "dict[str, int]":
    return dict(system.node_status().counters)


def await_counter(system: System, name: str, is_so: Callable[[int], bool]) -> None:
    until(lambda: is_so(counters(system)[name]), f"{name} is as it should be", every_s=STATUS_POLL_S)


def load_elsewhere(system: System, keys: list[bytes]) -> list[bytes | None]:
    """Load the keys in another process."""
    told = pickle.dumps((system.address, keys, BLOCK_BYTES)).hex()
    found: list[bytes | None] = pickle.loads(subprocess.run([sys.executable, "-c", LOADER, told], check=True, capture_output=True).stdout)
    return found


@pytest.mark.promise("holds-keep")
def test_held_blocks_stay_and_are_loaded_by_another_process(small: System, make_client: Callable[[], Client]) -> None:
    with make_client() as client:
        client.put_batch(HELD + UNHELD, values(HELD + UNHELD))
        client.exists(HELD[0])
        hold = new_hold(LONG_S)
        assert client.match_prefix(HELD, hold=hold) == len(HELD)
        assert client.match_prefix(UNHELD) == len(UNHELD)
        with writing(small) as writer:
            writer.turn_over()
            assert load_elsewhere(small, HELD) == values(HELD)
            assert client.get_batch(UNHELD) == [None] * len(UNHELD)
            client.release(pickle.loads(pickle.dumps(hold)))
            await_counter(small, "held_blocks", lambda count: not count)
            writer.turn_over()
            assert not any(client.exists_batch(HELD))
        assert (client.stats().held_blocks, client.stats().unheld_blocks) == (len(HELD), 0)


@pytest.mark.promise("holds-keep")
@HERE
def test_a_hold_ends_at_its_time(small: System, make_client: Callable[[], Client]) -> None:
    with make_client() as client:
        client.put_batch(HELD, values(HELD))
        client.exists(HELD[0])
        assert client.exists_batch([*HELD, b"never"], hold=new_hold(SHORT_S)) == [True] * len(HELD) + [False]
        await_counter(small, "held_blocks", lambda count: count == len(HELD))
        with writing(small) as writer:
            await_counter(small, "holds", lambda count: not count)
            writer.turn_over()
            assert not any(client.exists_batch(HELD))


@pytest.mark.promise("holds-keep")
def test_holds_end_with_a_client_that_is_killed(small: System) -> None:
    with small.client() as client:
        client.put_batch(HELD, values(HELD))
    told = pickle.dumps((small.address, HELD)).hex()
    with subprocess.Popen([sys.executable, "-c", HOLDER, told], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == len(HELD)
        await_counter(small, "held_blocks", lambda count: count == len(HELD))
        os.kill(holder.pid, signal.SIGKILL)
        await_counter(small, "holds", lambda count: not count)


@pytest.mark.promise("holds-keep")
def test_no_more_than_a_tenth_of_a_tier_is_held(small: System, make_client: Callable[[], Client]) -> None:
    many = [b"many-%d" % number for number in range(2 * TENTH_BLOCKS)]
    with make_client() as client:
        client.put_batch(many, values(many))
        client.exists(many[0])
        assert client.match_prefix(many, hold=new_hold(LONG_S)) == len(many)
        await_counter(small, "unheld_blocks", lambda count: count == len(many) - TENTH_BLOCKS)
        assert counters(small)["held_blocks"] == TENTH_BLOCKS
        assert (client.stats().held_blocks, client.stats().unheld_blocks) == (TENTH_BLOCKS, len(many) - TENTH_BLOCKS)
        with writing(small) as writer:
            writer.turn_over()
        assert client.match_prefix(many) == TENTH_BLOCKS


@pytest.mark.promise("holds-keep")
@HERE
def test_a_remove_with_force_takes_what_is_held(small: System, make_client: Callable[[], Client]) -> None:
    with make_client() as client:
        client.put_batch(HELD, values(HELD))
        client.exists(HELD[0])
        client.match_prefix(HELD, hold=new_hold(LONG_S))
        assert client.remove(HELD) == 0
        assert client.remove(HELD, force=True) == len(HELD)
        assert not any(client.exists_batch(HELD))
