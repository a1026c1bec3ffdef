"""Replacements of the operating system while a world runs: clocks, threads, sockets, gRPC, randomness.

The product's modules and their imports of each other are real. Only names of things outside the process are replaced, by the table at the
end, for as long as `installed` lasts.
"""

import gc
import os
import random
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import kvstore.client.connections.resources
import kvstore.client.connections.slabs
import kvstore.client.driver
import kvstore.client.local.nodes
import kvstore.client.local.reader_slots
import kvstore.client.local.shared_index
import kvstore.client.operations
import kvstore.client.sync
import kvstore.master.leadership.leader
import kvstore.master.leadership.partition
import kvstore.master.leadership.role_manager
import kvstore.master.master
import kvstore.master.periodic_tasks
import kvstore.master.server.tickets
import kvstore.master.status
import kvstore.rpc.address
import kvstore.rpc.client.channel
import kvstore.rpc.deadline
import kvstore.rpc.frame_reader
import kvstore.store.master_session.master_link
import kvstore.store.master_session.owner_search
import kvstore.store.node
import kvstore.store.periodic_tasks
import kvstore.store.replication.replica_fetch
import kvstore.store.replication.replica_queue
import kvstore.store.shared_index.index
import kvstore.store.shared_index.index_writer
import kvstore.store.shared_index.reader_slots
import kvstore.store.shared_memory
import kvstore.store.storage
import kvstore.store.tiering.mover
import kvstore.store.writes.checksums
import kvstore.store.writes.socket_puts
import kvstore.tiers.memfd
from kvstore.client.core.effects import Operation, drive
from kvstore.rpc.address import NOT_LOCAL
from kvstore.rpc.server.server import Server
from kvstore.tiers.policies.by_name import make_family
from tests.simulation.control import ControlPlane
from tests.simulation.loop import SimReactor
from tests.simulation.memory import Descriptors, SimMemfd, free_pages
from tests.simulation.network import FIRST_FD, Network
from tests.simulation.world import MS, Process, S, Thread, World

TICK_S = 0.2
BEAT_S = 0.5
"""Of daemons, longer than the product's: most of a quiet second would be these."""
BUFFER_BYTES = 4 << 10
"""Of connections, and of what a node throws away: to clear the product's own, 64 KiB and 1 MiB, took a twentieth of a run."""


class Clock:
    """The module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic_ns(self) -> int:
        world = self._world
        process = world.process
        assert process is not None, "no process runs"
        return process.ahead_ns + world.now_ns

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9

    def time_ns(self) -> int:
        return self._world.here.wall_ns()

    def time(self) -> float:
        return self.time_ns() / 1e9

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)


class SimEvent:
    """threading.Event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiting: list[tuple[Thread, int]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread, token in waiting:
            thread.wake(token, True)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._world.block(None if timeout is None else int(timeout * S), lambda *waiting: self._waiting.append(waiting))
        return self._is_set


class SimThread:
    """threading.Thread."""

    def __init__(self, world: World, target: Callable[..., object], args: Sequence[Any] = (), name: str = "", daemon: bool = True) -> None:
        self._world, self._target, self._args, self._name = world, target, args, name
        self._thread: Thread | None = None
        self.ident: int | None = None

    def start(self) -> None:
        self._thread, self.ident = self._world.here.spawn(lambda: self._target(*self._args), self._name), 1

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_over

    def join(self, timeout: float | None = None) -> None:
        thread = self._thread
        if thread is not None and not thread.is_over:
            self._world.block(None if timeout is None else int(timeout * S), lambda *waiting: thread.joiners.append(waiting))


class SimFuture:
    """concurrent.futures.Future: one thread waits, what ends it runs in another one."""

    def __init__(self, world: World) -> None:
        self._ended = SimEvent(world)
        self._result: Any = None
        self._error: BaseException | None = None

    def set_result(self, result: object) -> None:
        self._result = result
        self._ended.set()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


MOST_NS: Final = 2 * MS
"""Delay of a task of a pool, at most."""
SLOW_NS: Final = 100 * MS
"""The same of one in SLOW_ONE_IN, as if the disk were slow."""
SLOW_ONE_IN: Final = 10


class Executor:
    """kvstore.rpc.thread_pools.started. Each task starts after a delay, so those of several threads overtake one another."""

    def __init__(self, world: World, threads: int) -> None:
        self._world = world
        self._idle = threads
        self._process = world.here
        self._queue: list[Callable[[], object]] = []
        self._is_closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> "Future[Any]":
        self._queue.append(lambda: work(*args))
        self._begin()
        return Future()

    def _begin(self) -> None:
        if self._idle and self._queue and not self._is_closed:
            self._idle -= 1
            work = self._queue.pop(0)
            delay_ns = self._world.below(MOST_NS if self._world.below(SLOW_ONE_IN) else SLOW_NS)
            self._process.at(self._world.now_ns + delay_ns, lambda: self._process.spawn(lambda: self._run(work), "worker"))

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            self._idle += 1
            self._begin()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed = True


class OrderedSet(dict[Any, None]):
    """A set whose order is that of arrival: Python's own goes by where objects lie in memory."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class Names:
    """A module of which some names are others."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        """Once for each: from then on it is a name of its own."""
        value = self.__dict__[name] = getattr(self._module, name)
        return value


class NoForwarder:
    """In place of the thread that carries audit entries to another master: there are none here, and killed masters end no thread."""

    def __init__(self, *_parts: object) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


class Machine:
    """Everything that is outside a process of this world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.descriptors = Descriptors()
        self.network = Network(world, self.descriptors)
        self.control = ControlPlane(self.network)
        self.clock = Clock(world)
        self.make_catalog: Callable[..., Any]
        self.open_tiers: Callable[..., Any]
        self._sockets = 0

    def names(self) -> list[tuple[Any, str, Any]]:
        """(module, name, what it is here)."""
        world, clock = self.world, self.clock
        threads = Names(threading, Event=lambda: SimEvent(world), Thread=lambda **given: SimThread(world, **given))
        sockets = Names(socket, socket=self._socket)
        randoms = Names(random, Random=lambda *_seed: random.Random(world.rng.random()))
        node, link, master, relay = (
            kvstore.store.node,
            kvstore.store.master_session.master_link,
            kvstore.master.master,
            kvstore.master.leadership.partition,
        )
        storage, clockwork = kvstore.store.storage, kvstore.store.periodic_tasks
        sync, driver = kvstore.client.sync, kvstore.client.driver
        operations, resources = kvstore.client.operations, kvstore.client.connections.resources
        fetching, mover, queue = (
            kvstore.store.replication.replica_fetch,
            kvstore.store.tiering.mover,
            kvstore.store.replication.replica_queue,
        )
        table: list[tuple[Any, str, Any]] = [
            (kvstore.rpc.deadline, "time", clock),
            (kvstore.rpc.address, "connect", self.network.connect),
            (kvstore.rpc.client.channel, "socket", sockets),
            (kvstore.master.leadership.leader, "random", randoms),
            (kvstore.master.server.tickets, "secrets", Names(secrets, token_bytes=world.rng.randbytes)),
            (kvstore.master.leadership.role_manager, "gc", Names(gc, unfreeze=lambda: None, collect=lambda: None)),
            (link, "grpc", self.control.grpc),
            (link, "Future", lambda: SimFuture(world)),
            (link, "open_channel", self.control.open_channel),
            (link, "ControlStub", self.control.stub),
            (node, "new_instance", lambda: world.rng.getrandbits(63) | 1),
            (storage, "make_family", lambda name: make_family(name, clock=clock.monotonic)),
            (storage, "open_tiers", lambda settings, plan: self.open_tiers(settings, plan)),
            (storage, "make_engine", lambda *_args, **_options: None),
            (node, "watch_topology", lambda *_args: None),
            (clockwork, "EXPIRE_INTERVAL_S", TICK_S),
            (clockwork, "HEARTBEAT_INTERVAL_S", BEAT_S),
            *((module, "PERIOD_S", TICK_S) for module in (master, kvstore.master.periodic_tasks)),
            (master, "make_catalog", lambda *_args, partition, **_options: self.make_catalog(partition)),
            (master, "ControlServer", self.control.server),
            (master, "Forwarder", NoForwarder),
            (operations, "is_local_socket", self.is_local_socket),
            (resources, "local_socket_problem", lambda unix, told: "" if self.is_local_socket(unix, told) else NOT_LOCAL),
            (driver, "begin_thread", lambda run: world.here.spawn(run, "background")),
            (driver, "run_gathered", self.run_gathered),
        ]
        hosts = Names(socket, gethostname=lambda: world.here.host.name)
        table += [(module, "socket", hosts) for module in (node, master)]
        table += [(module, "os", Names(os, getpid=lambda: world.here.pid)) for module in (operations, resources)]
        table += [(module, "time", clock) for module in (storage, master, kvstore.master.status, operations, sync, driver)]
        table += [(module, "threading", threads) for module in (link, relay)]
        table += [(mover, "started", lambda threads, _name: Executor(world, threads))]
        # The number of checksum threads is that of processors: a schedule has the same result on every machine.
        table += [(module, "started", lambda *_args: Executor(world, 1)) for module in (queue, kvstore.store.writes.checksums)]
        table += [(module, "Reactor", lambda **options: SimReactor(self.network, **options)) for module in (node, master)]
        table += [(module, "Server", lambda *args, **options: SimServer(self, *args, **options)) for module in (node, master)]
        table += [(module, "socket_id", self.socket_id) for module in (node, master)]
        table += [(module, "is_local_socket", self.is_local_socket) for module in (kvstore.store.master_session.owner_search, fetching)]
        return table + self._of_memory()

    def _of_memory(self) -> list[tuple[Any, str, Any]]:
        """Shared memory, and the buffers of sockets."""
        descriptors, local, shown = self.descriptors, kvstore.client.local, kvstore.store.shared_index
        memfd, slabs = kvstore.tiers.memfd, kvstore.client.connections.slabs
        shared = kvstore.store.shared_memory
        exporting = (memfd, shared)
        passing = (
            shown.index,
            shown.index_writer,
            shown.reader_slots,
            slabs,
            local.nodes,
            local.reader_slots,
            local.shared_index,
            kvstore.rpc.client.channel,
        )
        mapping = (shared, slabs, local.reader_slots, local.shared_index)
        return [
            *((module, "os", descriptors) for module in (*exporting, *passing)),
            *((module, "fcntl", descriptors) for module in exporting),
            *((module, "map_slab", descriptors.map_slab) for module in mapping),
            (shown.index, "free_pages", free_pages),
            (memfd, "Memfd", lambda size_bytes, **options: SimMemfd(descriptors, size_bytes, **options)),
            (kvstore.rpc.frame_reader, "BUFFER_BYTES", BUFFER_BYTES),
            (kvstore.store.writes.socket_puts, "DISCARD_BYTES", BUFFER_BYTES),
        ]

    def _socket(self, *, fileno: int) -> Any:
        """From the descriptor of one that was detached."""
        assert fileno >= FIRST_FD
        return self.network.files[fileno]

    def socket_id(self, unix: str) -> str:
        host = self.world.here.host.name
        return f"{host}/{self.network.listeners[f'{host}:{unix}'].fileno()}"

    def is_local_socket(self, unix: str, expected_id: str) -> bool:
        """kvstore.rpc.address.is_local_socket."""
        host = self.world.here.host.name
        listener = self.network.listeners.get(f"{host}:{unix}")
        return listener is not None and expected_id == f"{host}/{listener.fileno()}"

    def run_gathered(self, operations: Sequence[Operation[Any]], do: Callable[[Any], Any]) -> list[Any]:
        """kvstore.client.driver.run_gathered, a thread each."""
        process, results, errors = self.world.here, [None] * len(operations), []

        def carry_out(index: int, operation: Operation[Any]) -> None:
            try:
                results[index] = drive(operation, do)
            except Exception as error:
                errors.append(error)

        threads = [
            process.spawn(lambda index=index, operation=operation: carry_out(index, operation), f"part {index}")  # type: ignore[misc]
            for index, operation in enumerate(operations)
        ]
        for thread in threads:
            if not thread.is_over:
                self.world.block(None, lambda *waiting, thread=thread: thread.joiners.append(waiting))
        if errors:
            raise errors[0]
        return results


class SimServer(Server):
    """The real one over listeners of the network."""

    def __init__(self, machine: Machine, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._spare.close()  # a descriptor of the system
        self._machine = machine
        self.sessions: Any = OrderedSet()

    def listen_tcp(self, host: str, port: int) -> str:
        self._add(self._machine.network.listen((host, port)))  # type: ignore[arg-type]
        return f"{host}:{port}"

    def listen_unix(self, path: Any, access: object = None) -> str:
        self._add(self._machine.network.listen(f"{self._machine.world.here.host.name}:{path}"))  # type: ignore[arg-type]
        return str(path)


@contextmanager
def installed(machine: Machine) -> Iterator[None]:
    """For as long as this lasts the product runs on it. One at a time in a process."""
    former = []
    try:
        for module, name, value in machine.names():
            former.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(former):
            setattr(module, name, value)


def clocks_of(client: Any, process: Process) -> None:
    """Clocks that are default arguments, bound before the world began."""
    client._driver.pool._clock_ns = process.monotonic_ns
    client._fast._clock_ns = process.monotonic_ns
    client._operations.local.clock_ns = process.monotonic_ns
    client._operations.resources.uncommitted_puts._clock_ns = process.monotonic_ns
    client._operations.resources.daemons._clock_ns = process.monotonic_ns
