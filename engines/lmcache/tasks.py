"""Tasks of an L2 adapter, and the locks that its lookups take.

Locks of an L2 adapter: which holds of the store stand for LMCache's locks, and when one of them may be released.

LMCache locks the objects that a lookup found, and unlocks each of them once it was loaded or is not wanted any more, in any order and with
those of other lookups. One lookup has one hold, which is released with the last of its objects.

Tasks of an L2 adapter: numbered, carried out by jobs of the store, their results fetched by number once an event descriptor has told of
one. It knows the shape of LMCache's keys and memory objects, not LMCache.

Nothing here raises. A task whose store cannot be reached, whose deadline is over or whose arguments make no sense ends as one that failed:
nothing found, nothing loaded, not stored. Each task ends, and each end is told by its descriptor.
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
    """What one lookup found."""

    hold: Hold
    until_ns: int
    names: set[bytes]
    """Not unlocked yet."""


class Locks:
    """Thread-safe. Locks whose hold is over are forgotten, so that a caller that never unlocks costs no memory for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lookups: deque[_Lookup] = deque()
        """By age; those released are still among them."""
        self._of_name: dict[bytes, deque[_Lookup]] = {}

    def add(self, hold: Hold, names: Sequence[bytes], now_ns: int) -> None:
        """A lookup found these blocks and holds them."""
        lookup = _Lookup(hold, now_ns + hold.duration_ms * 1_000_000, set(names))
        with self._lock:
            while self._lookups and (self._lookups[0].until_ns <= now_ns or not self._lookups[0].names):
                self._forget(self._lookups.popleft())
            self._lookups.append(lookup)
            for name in lookup.names:
                self._of_name.setdefault(name, deque()).append(lookup)

    def unlock(self, names: Sequence[bytes]) -> list[Hold]:
        """One lock of each block is over, the oldest. Returns the holds that have none left: the caller releases them."""
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
        """Its hold has ended by itself."""
        for name in lookup.names:
            of_name = self._of_name[name]
            of_name.remove(lookup)
            if not of_name:
                del self._of_name[name]
        lookup.names.clear()


log = logging.getLogger("kvstore.engines.lmcache")

HOLD_S: Final = 30.0
"""How long a lookup keeps what it found from eviction, unless LMCache unlocks it sooner, as it does after the load: longer than a load may
take and wait for its turn. Nodes allow `max_lease_s` at most."""

T = TypeVar("T")
K = TypeVar("K", bound=ObjectKey)


class MemoryObject(Protocol):
    """LMCache's memory of one object, LMCache's until the task is over."""

    @property
    def byte_array(self) -> Any: ...


class StoreResult(NamedTuple):
    """How a store ended."""

    is_whole: bool
    """The store has all of its objects."""
    new_bytes: int
    """Of those that it did not have before."""


class Results(Generic[T]):
    """Of one kind of task, until they are fetched. Thread-safe."""

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._is_open = True

    def tell(self, task: int, result: T) -> None:
        """A task is over. Told to nobody once it is closed: its descriptor's number may be somebody else's by then."""
        with self._lock:
            if self._is_open:
                self._results[task] = result
                os.eventfd_write(self.event_fd, 1)

    def take(self, task: int) -> T | None:
        """Once; None for a task that is not over."""
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
    """The tasks of one adapter. Thread-safe; `jobs` and `client` are the caller's."""

    def __init__(
        self,
        client: Client,
        jobs: Jobs,
        keys: ChunkKeys,
        *,
        on_stored: Callable[[list[K], list[int]], object],
        on_loaded: Callable[[list[K]], object],
    ) -> None:
        """`on_stored(keys, sizes)` hears of what is new in the store, `on_loaded` of what was read, before the task's descriptor does."""
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
        """Put the objects; the number of the task."""

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
                self.stores.tell(task, StoreResult(all(all(job.succeeded) for job in ended), sum(new_sizes)))

            if not batches:
                end()
            for namespace, indices in batches.items():
                names, of_namespace = [named[index][1] for index in indices], [values[index] for index in indices]
                self._jobs.store(names, of_namespace, namespace=namespace, on_done=partial(done, indices))

        return self._begin(self.stores, StoreResult(False, 0), submit)

    def look_up(self, keys: Sequence[K]) -> int:
        """Find out which objects the store has, and have these stay until `unlock`; the number of the task."""
        nothing = [False] * len(keys)

        def submit(task: int) -> None:
            names, hold = self._names(keys), new_hold(HOLD_S)

            def done(job: Job) -> None:
                self._locked(hold, [name for name, is_found in zip(names, job.succeeded, strict=True) if is_found])
                self.lookups.tell(task, job.succeeded)

            self._jobs.lookup(names, hold=hold, on_done=done)

        return self._begin(self.lookups, nothing, submit)

    def _locked(self, hold: Hold, names: Sequence[bytes]) -> None:
        if names:
            self._locks.add(hold, names, time.monotonic_ns())
        else:
            self._jobs.release(hold)

    def unlock(self, keys: Sequence[K]) -> None:
        """These objects were loaded, or are not wanted any more: once for each lookup that found them."""
        try:
            for hold in self._locks.unlock(self._names(keys)):
                self._jobs.release(hold)
        except Exception:
            log.exception("objects could not be unlocked")

    def load(self, keys: Sequence[K], objects: Sequence[MemoryObject]) -> int:
        """Fill the objects; the number of the task. One of another size than the store's is a miss, as one that it has not."""
        nothing = [False] * len(keys)

        def submit(task: int) -> None:
            buffers = [obj.byte_array for obj in objects]
            sizes = [len(buffer) for buffer in buffers]

            def done(job: Job) -> None:
                loaded = [result == size for result, size in zip(job.results, sizes, strict=True)]
                self._notify(lambda: self._on_loaded([key for key, is_loaded in zip(keys, loaded, strict=True) if is_loaded]), any(loaded))
                self.loads.tell(task, loaded)

            self._jobs.load(self._names(keys), buffers, on_done=done)

        return self._begin(self.loads, nothing, submit)

    def remove(self, keys: Sequence[K], *, deadline_s: float) -> dict[K, int]:
        """Delete objects, and wait for it: those that were there and are gone, with their sizes in bytes. None where the store cannot be
        reached. Objects that are locked stay, and so may what another server put within the last milliseconds."""
        try:
            names = self._names(keys)
            if not any(self._jobs.exists(names)):
                return {}
            self._client.flush(deadline_s=deadline_s)  # what the cluster has not heard of yet it cannot remove
            sizes = [max((each.size_bytes for each in found), default=0) for found in self._client.locate(names, deadline_s=deadline_s)]
            removed = self._client.remove(names, deadline_s=deadline_s)
            stay = self._jobs.exists(names) if removed < sum(map(bool, sizes)) else [False] * len(names)
            return {key: size for key, size, stays in zip(keys, sizes, stay, strict=True) if size and not stays}
        except Exception:
            log.exception("objects could not be deleted")
            return {}

    def close(self) -> None:
        """Take no more results. Once the jobs are closed: nothing is told any more then."""
        for results in (self.stores, self.lookups, self.loads):
            results.close()

    def _begin(self, results: Results[T], failure: T, submit: Callable[[int], None]) -> int:
        task = next(self._numbers)
        try:
            submit(task)
        except Exception:
            log.exception("a task that makes no sense is taken for one that failed")
            results.tell(task, failure)
        return task

    def _names(self, keys: Sequence[K]) -> list[bytes]:
        return [self._keys.of_object(key)[1] for key in keys]

    def _notify(self, notify: Callable[[], object], is_due: bool) -> None:
        """Listeners are LMCache's: what they raise must not keep a task from ending."""
        if is_due:
            try:
                notify()
            except Exception:
                log.exception("a listener failed")
