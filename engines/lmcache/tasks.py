"""Tasks of an LMCache L2 adapter, and the locks that its lookups take.

**Tasks** are numbered and run as jobs of the store. A result is fetched by number after an event descriptor signalled
it. A task whose store is unreachable, whose deadline passed or whose arguments are invalid ends as failed: not found,
not loaded, not stored. Every task ends, and its descriptor signals every end. No method raises.

**Locks.** LMCache locks the objects that a lookup found, and unlocks each after its load or when it is no longer
needed. Unlocks come in any order, mixed with those of other lookups. One lookup has one hold, which is released with
its last object.

The module uses LMCache's keys and memory objects through protocols and does not import LMCache.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from kvstore.client.holds import Hold, new_hold
from kvstore.client.jobs.job import Job
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.sync import Client
from kvstore.engines.lmcache.keys import ChunkKeys, ObjectKey, by_namespace


@dataclass(slots=True, eq=False)
class _Lookup:
    """Objects that one lookup found and holds."""

    hold: Hold
    until_ns: int
    names: set[bytes]
    """Keys that are not unlocked yet."""


class Locks:
    """Maps LMCache's locks to holds of the store. Thread-safe. Locks with an expired hold are dropped, so a caller
    that never unlocks does not leak memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lookups: deque[_Lookup] = deque()
        """By age, including released ones."""
        self._of_name: dict[bytes, deque[_Lookup]] = {}

    def add(self, hold: Hold, names: Sequence[bytes], now_ns: int) -> None:
        """Record that a lookup found and holds these blocks."""
        lookup = _Lookup(hold, now_ns + hold.duration_ms * 1_000_000, set(names))
        with self._lock:
            while self._lookups and (self._lookups[0].until_ns <= now_ns or not self._lookups[0].names):
                self._forget(self._lookups.popleft())
            self._lookups.append(lookup)
            for name in lookup.names:
                self._of_name.setdefault(name, deque()).append(lookup)

    def unlock(self, names: Sequence[bytes]) -> list[Hold]:
        """Remove the oldest lock of each block. Return the holds without locks, which the caller releases."""
        over = []
        with self._lock:
            for name in names:
                lookup = self._take(name)
                if lookup is not None:
                    lookup.names.discard(name)
                    if not lookup.names:
                        over.append(lookup.hold)
        return over

    def _take(self, name: bytes) -> _Lookup | None:
        lookups = self._of_name.get(name)
        if lookups is None:
            return None
        lookup = lookups.popleft()
        if not lookups:
            del self._of_name[name]
        return lookup

    def _forget(self, lookup: _Lookup) -> None:
        """Drop a lookup whose hold expired."""
        for name in lookup.names:
            of_name = self._of_name[name]
            of_name.remove(lookup)
            if not of_name:
                del self._of_name[name]
        lookup.names.clear()


log = logging.getLogger("kvstore.engines.lmcache")

HOLD_S: Final = 30.0
"""Duration of a lookup's hold unless LMCache unlocks earlier, as it does after the load. Longer than a load with its
queueing. Nodes cap it at `max_lease_s`."""

T = TypeVar("T")
K = TypeVar("K", bound=ObjectKey)


class MemoryObject(Protocol):
    """LMCache's memory of one object. LMCache may free it after the task ended."""

    @property
    def byte_array(self) -> Any: ...


class StoreResult(NamedTuple):
    """Outcome of a store task."""

    is_whole: bool
    """The store has all objects of the task."""
    new_bytes: int
    """Bytes of the objects that were not in the store before."""


class Results(Generic[T]):
    """Results of one kind of task, until they are fetched. Thread-safe."""

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._is_open = True

    def complete(self, task: int, result: T) -> None:
        """Record a task's result and signal the descriptor. A no-op after `close`, because the descriptor's number
        may be reused."""
        with self._lock:
            if self._is_open:
                self._results[task] = result
                os.eventfd_write(self.event_fd, 1)

    def take(self, task: int) -> T | None:
        """Remove and return a result; None if the task has not ended."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        with self._lock:
            taken, self._results = self._results, {}
            return taken

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self.event_fd)


class Tasks(Generic[K]):
    """Tasks of one adapter. Thread-safe; the caller owns `jobs` and `client`."""

    def __init__(
        self,
        client: Client,
        jobs: Jobs,
        keys: ChunkKeys,
        *,
        on_stored: Callable[[list[K], list[int]], object],
        on_loaded: Callable[[list[K]], object],
    ) -> None:
        """Create it without tasks. `on_stored(keys, sizes)` receives new objects, `on_loaded` loaded ones, both
        before the task's descriptor is signalled."""
        self.stores: Results[StoreResult] = Results()
        self.lookups: Results[list[bool]] = Results()
        self.loads: Results[list[bool]] = Results()
        self._client = client
        self._jobs = jobs
        self._keys = keys
        self._locks = Locks()
        self._on_stored = on_stored
        self._on_loaded = on_loaded
        self._numbers = count(1)

    def store(self, keys: Sequence[K], objects: Sequence[MemoryObject]) -> int:
        """Start to put the objects; return the task's number."""

        def submit(task: int) -> None:
            named = [self._keys.of_object(key) for key in keys]
            values = [obj.byte_array for obj in objects]
            sizes = [len(value) for value in values]
            batches = by_namespace(named)
            ended: list[Job] = []
            new: list[int] = []
            lock = threading.Lock()

            def done(indices: Sequence[int], job: Job) -> None:
                with lock:
                    ended.append(job)
                    new.extend(index for index, result in zip(indices, job.results, strict=True) if result is True)
                    is_last = len(ended) == len(batches)
                if is_last:
                    end()

            def end() -> None:
                new_sizes = [sizes[index] for index in new]
                self._notify(lambda: self._on_stored([keys[index] for index in new], new_sizes), bool(new))
                self.stores.complete(task, StoreResult(all(all(job.succeeded) for job in ended), sum(new_sizes)))

            if not batches:
                end()
            for namespace, indices in batches.items():
                names, of_namespace = [named[index][1] for index in indices], [values[index] for index in indices]
                self._jobs.store(names, of_namespace, namespace=namespace, on_done=partial(done, indices))

        return self._begin(self.stores, StoreResult(False, 0), submit)

    def look_up(self, keys: Sequence[K]) -> int:
        """Start to look up and hold objects until `unlock`; return the task's number."""
        nothing = [False] * len(keys)

        def submit(task: int) -> None:
            names, hold = self._names(keys), new_hold(HOLD_S)

            def done(job: Job) -> None:
                self._locked(hold, [name for name, is_found in zip(names, job.succeeded, strict=True) if is_found])
                self.lookups.complete(task, job.succeeded)

            self._jobs.lookup(names, hold=hold, on_done=done)

        return self._begin(self.lookups, nothing, submit)

    def _locked(self, hold: Hold, names: Sequence[bytes]) -> None:
        if names:
            self._locks.add(hold, names, time.monotonic_ns())
        else:
            self._jobs.release(hold)

    def unlock(self, keys: Sequence[K]) -> None:
        """Release one lock of each object: call it once for each lookup that found the object."""
        try:
            for hold in self._locks.unlock(self._names(keys)):
                self._jobs.release(hold)
        except Exception:
            log.exception("objects could not be unlocked")

    def load(self, keys: Sequence[K], objects: Sequence[MemoryObject]) -> int:
        """Start to fill the objects; return the task's number. An object whose size differs from the stored one is a
        miss."""
        nothing = [False] * len(keys)

        def submit(task: int) -> None:
            buffers = [obj.byte_array for obj in objects]
            sizes = [len(buffer) for buffer in buffers]

            def done(job: Job) -> None:
                loaded = [result == size for result, size in zip(job.results, sizes, strict=True)]
                self._notify(lambda: self._on_loaded([key for key, is_loaded in zip(keys, loaded, strict=True) if is_loaded]), any(loaded))
                self.loads.complete(task, loaded)

            self._jobs.load(self._names(keys), buffers, on_done=done)

        return self._begin(self.loads, nothing, submit)

    def remove(self, keys: Sequence[K], *, deadline_s: float) -> dict[K, int]:
        """Delete objects and wait; return those that were removed, with their sizes in bytes.

        Returns nothing if the store is unreachable. Locked objects stay, and objects that another server put
        milliseconds ago may.
        """
        try:
            names = self._names(keys)
            if not any(self._jobs.exists(names)):
                return {}
            self._client.flush(deadline_s=deadline_s)  # uncommitted blocks cannot be removed
            sizes = [max((each.size_bytes for each in found), default=0) for found in self._client.locate(names, deadline_s=deadline_s)]
            removed = self._client.remove(names, deadline_s=deadline_s)
            stay = self._jobs.exists(names) if removed < sum(map(bool, sizes)) else [False] * len(names)
            return {key: size for key, size, stays in zip(keys, sizes, stay, strict=True) if size and not stays}
        except Exception:
            log.exception("objects could not be deleted")
            return {}

    def close(self) -> None:
        """Drop results and close the descriptors. Close the jobs first."""
        for results in (self.stores, self.lookups, self.loads):
            results.close()

    def _begin(self, results: Results[T], failure: T, submit: Callable[[int], None]) -> int:
        task = next(self._numbers)
        try:
            submit(task)
        except Exception:
            log.exception("a task has invalid arguments and counts as failed")
            results.complete(task, failure)
        return task

    def _names(self, keys: Sequence[K]) -> list[bytes]:
        return [self._keys.of_object(key)[1] for key in keys]

    def _notify(self, notify: Callable[[], object], is_due: bool) -> None:
        """Call LMCache's listener; its exceptions must not keep the task from ending."""
        if is_due:
            try:
                notify()
            except Exception:
                log.exception("a listener failed")
