"""Masters and nodes killed again and again under load, in an order drawn from a seed, while every answer is checked against a history.

A removal does not reach a node that is unreachable, or not yet registered with a new master. No process keeps removals for a node that
returns with an older version. So the history records an end only if all nodes were registered from start to end of the call.
"""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client.sync import Client
from kvstore.protocol.errors import Retry
from tests.system.history import History, value_of
from tests.system.running import System, until

CYCLES = 8
WRITERS, KEYS_PER_WRITER = 4, 16
PAUSE_S = 0.004
"""Of a writer after each operation, twice the time of one: some are in flight at each kill, and daemons that start get a processor."""
SIZES = (2 << 10, 40 << 10, 100 << 10)
"""A value sent inline, one written inline and read by mapping, one written through shared memory."""


class Oracle:
    """The history, shared by threads; which versions must be there; and when nothing is being killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._history = History()
        self._stored: dict[bytes, int] = {}
        self._disturbances = self._node_changes = 0
        self.hits = self.misses = self.errors = 0
        self.failure: BaseException | None = None

    @contextmanager
    def disturbed(self, *, kills_node: bool) -> Iterator[None]:
        """A miss is legal meanwhile; after a node's end also for what it may have held in DRAM only."""
        for step in (1, 0):
            with self._lock:
                self._disturbances += 1
                self._node_changes += kills_node
                if kills_node:
                    self._stored.clear()
            if step:
                yield

    def put(self, client: Client, key: bytes, size: int) -> None:
        with self._lock:
            version, changes, quiet = self._history.begin_put(key), self._node_changes, self._disturbances
        try:
            is_stored = client.put(key, value_of(key, version, size))
        except Retry:
            with self._lock:
                self._history.failed(key, version)
            raise
        with self._lock:
            if is_stored and self._was_quiet_since(quiet):
                self._history.stored(key, version)
            if is_stored and self._node_changes == changes:
                self._stored[key] = version

    def remove(self, client: Client, key: bytes) -> None:
        with self._lock:
            self._stored.pop(key, None)
            quiet = self._disturbances
        if client.remove([key]):
            with self._lock:
                if self._was_quiet_since(quiet):
                    self._history.removed(key)

    def get(self, read: Callable[[bytes], bytes | None], key: bytes) -> None:
        with self._lock:
            started, quiet = self._history.now(), self._disturbances
            was_stored = self._stored.get(key) is not None
        value = read(key)
        with self._lock:
            if value is not None:
                self.hits += 1
                self._history.check(key, value, started)
                return
            self.misses += 1
            is_stored = was_stored and key in self._stored
            assert not (is_stored and self._was_quiet_since(quiet)), f"{key!r} was acknowledged and is a miss"

    def _was_quiet_since(self, disturbances: int) -> bool:
        """All daemons were there since there had been so many beginnings and ends of disturbances."""
        return disturbances == self._disturbances and disturbances % 2 == 0


def view(client: Client, key: bytes) -> bytes | None:
    with client.view(key) as memory:
        return None if memory is None else bytes(memory)


def work(oracle: Oracle, client: Client, mine: list[bytes], everyones: list[bytes], seed: int, is_over: threading.Event) -> None:
    """Write, remove and read one's own keys, and read those of others, until it is over or something is wrong."""
    choose = random.Random(seed)
    while not is_over.wait(PAUSE_S) and oracle.failure is None:
        key, act = choose.choice(mine), choose.random()
        try:
            if act < 0.3:
                oracle.put(client, key, choose.choice(SIZES))
            elif act < 0.4:
                oracle.remove(client, key)
            elif act < 0.7:
                oracle.get(client.get, choose.choice(everyones))
            elif act < 0.8:
                oracle.get(lambda one: view(client, one), choose.choice(everyones))
            else:
                oracle.get(client.get, key)
        except Retry:
            oracle.errors += 1
        except BaseException as error:
            oracle.failure = error


@contextmanager
def load(oracle: Oracle, clients: list[Client]) -> Iterator[None]:
    """Writers at work inside, each with keys of its own."""
    keys = [[b"%d/%d" % (writer, number) for number in range(KEYS_PER_WRITER)] for writer in range(len(clients))]
    everyones = list(itertools.chain.from_iterable(keys))
    is_over = threading.Event()
    workers = [
        threading.Thread(target=work, args=(oracle, client, keys[index], everyones, index, is_over)) for index, client in enumerate(clients)
    ]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        is_over.set()
        for worker in workers:
            worker.join()


def disturb(system: System, oracle: Oracle, choose: random.Random) -> None:
    """Kill one or two daemons and start them again; returns when the master knows all."""
    victims = choose.choice([["n0"], ["n1"], ["master"], ["master", "n0"], ["n0", "n1"]])
    with oracle.disturbed(kills_node=victims != ["master"]):
        for name in victims:
            system.masters[0].kill() if name == "master" else system.kill_node(name)
        for name in victims:
            if name == "master":
                system.start_master()
            else:
                system.start_node(name)
        system.await_alive("n0", "n1")


@pytest.mark.promise("get-exact-bytes")
@pytest.mark.parametrize(("catalog", "seed"), [("memory:", 1), ("lmdb:{}", 2), pytest.param("lmdb:{}", 3, marks=pytest.mark.slow)])
def test_a_get_returns_a_version_that_could_be_current_or_a_miss(tmp_path: Path, catalog: str, seed: int) -> None:
    oracle, choose = Oracle(), random.Random(seed)
    with System(tmp_path, catalog.format(tmp_path / "catalog")) as system:
        system.start_master()
        for name in ("n0", "n1"):
            system.start_node(name, "--dram", "2MiB", "--nvme", f"{tmp_path / name}-nvme:64MiB")
        clients = [make(deadline_s=3.0) for make in (system.client, system.remote_client) * (WRITERS // 2)]
        with load(oracle, clients):
            for _ in range(CYCLES):
                hits = oracle.hits
                until(lambda hits=hits: oracle.hits > hits + 50 or oracle.failure is not None, "load")  # type: ignore[misc]
                disturb(system, oracle, choose)
        for client in clients:
            client.close()
        if oracle.failure is not None:
            raise oracle.failure
        for name in ("n0", "n1"):
            assert system.await_settled(name).counters["corrupt_reads"] == 0
            system.await_counters(name, open_puts=0, leases=0)
        assert oracle.hits > CYCLES * 50
