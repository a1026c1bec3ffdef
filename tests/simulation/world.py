"""The simulated world: one virtual clock, one queue of events, and processes that run only while an event of theirs does.

Everything happens in one thread of this Python: an event is a call at a virtual time, in a process. Threads of a simulated process are
greenlets, which run from one blocking call to the next. All randomness comes from one generator, so that a seed makes one history.
"""

import gc
import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import greenlet

MS: Final = 1_000_000
S: Final = 1_000_000_000
START_NS: Final = 1_000 * S
"""Monotonic clocks begin well after zero, as they do on machines: zero stands for "never" in places."""
WALL_NS: Final = 1_800_000_000 * S
EVENTS_A_COLLECTION: Final = 20_000
"""Events between two garbage collections. Finalizers notify the product, so collections are part of a history and run at fixed times."""


class Stopped(greenlet.GreenletExit):
    """The world has ended, and with it all waiting threads."""


class Host:
    """A machine: its clocks, and what outlives its processes. `skew_ns` is what its monotonic clock is ahead; `wall_offset_ns` may jump."""

    def __init__(self, name: str, *, skew_ns: int = 0, wall_offset_ns: int = 0) -> None:
        self.name = name
        self.skew_ns = skew_ns
        self.wall_offset_ns = wall_offset_ns


class Thread:
    """A greenlet of a process. `token` changes each time that it blocks: who would wake it too late finds another one."""

    __slots__ = ("greenlet", "is_over", "joiners", "name", "process", "token", "world")

    def __init__(self, process: "Process", run: Callable[[], object], name: str) -> None:
        self.process = process
        self.world = process.world
        self.name = name
        self.token = 0
        self.greenlet = greenlet.greenlet(partial(self._run, run), self.world.hub)
        self.is_over = False
        self.joiners: list[tuple[Thread, int]] = []

    def _run(self, run: Callable[[], object], _began: object) -> None:
        try:
            run()
        except greenlet.GreenletExit:
            return
        except Exception as error:
            self.world.finding("a thread died", f"{self.process.name} {self.name}: {type(error).__name__}: {error}", error)
        finally:
            self.is_over = True
            for thread, token in self.joiners:
                thread.wake(token, True)

    def step(self, value: object = None) -> None:
        """Run it to its next blocking call. In the hub only."""
        world = self.world
        if not self.is_over:
            world.thread = self
            try:
                self.greenlet.switch(value)
            finally:
                world.thread = None

    def wake(self, token: int, value: object, delay_ns: int = 0) -> None:
        """Go on, if it still waits where it had this token."""
        if token == self.token and not self.is_over:
            self.token += 1
            self.process.at(self.world.now_ns + delay_ns, partial(self.step, value))


class Process:
    """A process of a host: it runs, is stopped (SIGSTOP), or is dead. A dead one is never run again; its successor is another object."""

    def __init__(self, world: "World", host: Host, name: str, pid: int) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.pid = pid
        self.ahead_ns = START_NS + host.skew_ns
        """Of its monotonic clock, beside the world's."""
        self.is_alive = True
        self.is_stopped = False
        self.stopped_until_ns = -1
        """When it last went on after it had been stopped."""
        self.parked: list[Callable[[], object]] = []
        """Callbacks that became due while the process was stopped."""
        self.threads: list[Thread] = []
        self._pruned_at = 64
        self.on_death: list[Callable[[], None]] = []
        """Actions of the kernel at a death: end connections, listeners and memory."""

    def monotonic_ns(self) -> int:
        return self.ahead_ns + self.world.now_ns

    def wall_ns(self) -> int:
        return WALL_NS + self.host.wall_offset_ns + self.world.now_ns

    def at(self, world_ns: int, call: Callable[[], object]) -> None:
        world, now_ns = self.world, self.world.now_ns
        heapq.heappush(world.queue, (world_ns if world_ns > now_ns else now_ns, world.next_serial(), self, call))

    def soon(self, call: Callable[[], object]) -> None:
        world = self.world
        heapq.heappush(world.queue, (world.now_ns, world.next_serial(), self, call))

    def spawn(self, run: Callable[[], object], name: str) -> Thread:
        thread = Thread(self, run, name)
        if len(self.threads) >= self._pruned_at:
            self.threads = [each for each in self.threads if not each.is_over]
            self._pruned_at = 2 * len(self.threads) + 64
        self.threads.append(thread)
        self.soon(thread.step)
        return thread

    def stop(self) -> None:
        self.is_stopped = True

    def was_stopped_since(self, world_ns: int) -> bool:
        return self.is_stopped or self.stopped_until_ns >= world_ns

    def resume(self) -> None:
        if self.is_stopped:
            self.is_stopped = False
            self.stopped_until_ns = self.world.now_ns
            parked, self.parked = self.parked, []
            for call in parked:
                self.soon(call)

    def die(self) -> None:
        if self.is_alive:
            self.is_alive = False
            self.parked.clear()
            for release in self.on_death:
                release()


class Finding(Exception):
    """A violation by the product. `kind` is one of a few fixed phrases; a shrunk schedule must find the same kind."""

    def __init__(self, kind: str, detail: str, at_ns: int) -> None:
        super().__init__(f"{kind}: {detail} (at {at_ns / 1e9:.6f} s)")
        self.kind = kind
        self.detail = detail


class World:
    """See the module."""

    def __init__(self, seed: int, *, keeps_trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.hub = greenlet.getcurrent()
        self.thread: Thread | None = None
        self.process: Process | None = None
        """Whose code runs now."""
        self.processes: list[Process] = []
        self.findings: list[Finding] = []
        self.lines: list[str] | None = [] if keeps_trace else None
        self.events = 0
        self.is_over = False
        self.at_end: list[Callable[[], None]] = []
        self.queue: list[tuple[int, int, Process | None, Callable[[], object]]] = []
        """A heap: when, which was pushed first, whose, what. Reactors and processes push by themselves: there is an event for each step of
        everything, and a call more for each of them tells."""
        self.next_serial = itertools.count().__next__
        self.random: Callable[[], float] = self.rng.random
        self._pids = itertools.count(100)
        self._trace = hashlib.blake2b(digest_size=16)

    # --- events ---

    def push(self, when_ns: int, process: Process | None, call: Callable[[], object]) -> None:
        now_ns = self.now_ns
        heapq.heappush(self.queue, (when_ns if when_ns > now_ns else now_ns, self.next_serial(), process, call))

    def after(self, delay_ns: int, call: Callable[[], object]) -> None:
        """An event of the world itself: the network's, a fault."""
        heapq.heappush(self.queue, (self.now_ns + max(0, delay_ns), self.next_serial(), None, call))

    def run(self, limit_ns: int, until: Callable[[], bool] | None = None) -> None:
        """Run events up to a time, or until it is so; not beyond a finding."""
        heap, pop, findings = self.queue, heapq.heappop, self.findings
        while not findings and not (until is not None and until()):
            if not heap or heap[0][0] > limit_ns:
                self.now_ns = max(self.now_ns, limit_ns)
                return
            self.now_ns, _, process, call = pop(heap)
            self.events += 1
            if not self.events % EVENTS_A_COLLECTION:
                gc.collect(1)
            if process is None:
                call()
            elif process.is_alive:
                if process.is_stopped:
                    process.parked.append(call)
                else:
                    self.process = process
                    try:
                        call()
                    finally:
                        self.process = None

    def start(self, host: Host, name: str) -> Process:
        process = Process(self, host, name, next(self._pids))
        self.processes.append(process)
        return process

    @contextmanager
    def within(self, process: Process | None) -> Iterator[None]:
        """Run code from outside, such as a check, as part of this process."""
        self.process = process
        try:
            yield
        finally:
            self.process = None

    # --- what code of a process calls ---

    @property
    def here(self) -> Process:
        """The process whose code runs."""
        assert self.process is not None, "no process runs"
        return self.process

    def block(self, timeout_ns: int | None, begin: Callable[[Thread, int], None] = lambda _thread, _token: None) -> Any:
        """Block the calling thread until it is woken with a value, or None at the timeout. `begin` is given what wakes it."""
        if self.is_over:
            raise Stopped
        thread = self.thread
        assert thread is not None, "only a thread may block, and the loop is none"
        token = thread.token
        begin(thread, token)
        if timeout_ns is not None:
            thread.process.at(self.now_ns + timeout_ns, partial(self._expire, thread, token))
        return self.hub.switch()

    def _expire(self, thread: Thread, token: int) -> None:
        if token == thread.token:
            thread.token += 1
            thread.step(None)

    def sleep(self, seconds: float) -> None:
        self.block(int(seconds * S))

    def below(self, most: int) -> int:
        """Any of [0, most): a delay, mostly. Random.randrange takes three times as long."""
        return int(self.random() * most)

    # --- trace and findings ---

    def trace(self, *words: object) -> None:
        """Part of the history's hash, and of the trace that is printed."""
        line = f"{self.now_ns} {' '.join(map(str, words))}"
        self._trace.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    def note(self, *words: object) -> None:
        """Only for the trace that is printed."""
        if self.lines is not None:
            self.lines.append(f"{self.now_ns}    {' '.join(map(str, words))}")

    def trace_hash(self) -> str:
        return self._trace.hexdigest()

    def finding(self, kind: str, detail: str, cause: BaseException | None = None) -> None:
        finding = Finding(kind, detail, self.now_ns)
        finding.__cause__ = cause
        self.trace("FINDING", kind, detail)
        self.findings.append(finding)

    def close(self) -> None:
        """End all of it: threads are thrown out of where they wait, in the order of their making."""
        self.is_over = True
        for process in self.processes:
            self.process = process
            for thread in process.threads:
                if not thread.is_over and thread.greenlet:
                    thread.greenlet.throw(Stopped())
        self.process = None
        for release in self.at_end:
            release()
        self.queue.clear()
