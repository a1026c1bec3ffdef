"""Group commit of a catalog: one thread writes queued batches together, with retries, and does background work in
between."""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvstore.master.catalogs.interface import BlockPuts, Catalog, Change, CommitStats, Done, Op
from kvstore.protocol.errors import Closed, InvalidArgument, KVStoreError, StaleEpoch
from kvstore.rpc.reactor import Reactor
from kvstore.telemetry.metrics.histogram import Histogram


class Backoff:
    """Delays that double from `first_s` to at most `longest_s`, each scaled by 0.5 to 1.0 at random.

    `jitter` returns numbers in [0, 1); the default has its own generator, so that retries leave the program's random
    sequence alone. Not thread-safe: one retry loop owns it. Source: "Exponential Backoff And
    Jitter", AWS Architecture Blog, 2015 ("equal jitter")."""

    def __init__(self, *, first_s: float, longest_s: float, jitter: Callable[[], float] | None = None) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._jitter = jitter or random.Random().random
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        delay_s = self._ceiling_s * (0.5 + 0.5 * self._jitter())
        self._ceiling_s = min(self._ceiling_s * 2, self._longest_s)
        return delay_s

    def reset(self) -> None:
        """Start from `first_s` again, after a success."""
        self._ceiling_s = self._first_s


LOG = logging.getLogger("kvstore.master")

MAX_KEY_BYTES = 400
MAX_VALUE_BYTES = 64 * 1024
MAX_TENANT_BYTES = 128
MAX_TEXT_BYTES = 255
"""Of a block's key, its parent's key, and its namespace."""
MAX_HOLDERS = 65_535
MAX_GROUP_OPS = 16_384
MAX_GROUP_BYTES = 64 * 1024 * 1024
"""A group takes no further batch past either limit. Otherwise the queue of an outage would be one transaction of
gigabytes and a wait of minutes. A single larger batch is a group of its own."""
LAST_TRY_S = 1.0
"""Time that `close` gives a write under way before it interrupts it."""
SLOW_COMMIT_S = 1.0
"""`health` reports a commit that takes longer. A healthy etcd takes some 10 ms."""

Owned = TypeVar("Owned")
"""A catalog's state of one ownership, from an election to its end."""
_Batch = tuple[Sequence[Change], Done, Owned | None]


class GroupCommit(Generic[Owned]):
    """Queue of batches and the thread that writes them. Thread-safe, but for `start` and `close`.

    - `write(changes, owned)` returns once all changes are durable; `owned` is the value of `admit` when they were
      submitted. StaleEpoch from it means that this master no longer owns the catalog: all batches fail with it until
      the next `admit`, and `on_stale` is called. After any other error the same changes are retried with back-off, so
      `write` must be idempotent.
    - `interrupt`, called from another thread, makes a write under way fail soon.
    - `background(owned)` does one step of other work in this thread, and returns True if more is left. It runs while
      the queue is empty, and after each group for half that group's time: neither starves the other."""

    def __init__(
        self,
        write: Callable[[Sequence[Change], Owned], None],
        *,
        backoff: Backoff,
        interrupt: Callable[[], None] = lambda: None,
        on_stale: Callable[[StaleEpoch], None] = lambda error: None,
        background: Callable[[Owned], bool] = lambda owned: False,
    ) -> None:
        self._write = write
        self._interrupt = interrupt
        self._on_stale = on_stale
        self._background = background
        self._has_more = False
        self._backoff = backoff
        self._queue: deque[_Batch[Owned]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._closed: Closed | None = None
        self._owned: Owned | None = None
        self._refusal = StaleEpoch("this master does not own the catalog")
        self._outage: str | None = None
        self._began_s: float | None = None
        """Start of the group under way."""
        self._durations = Histogram()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="catalog-commit", daemon=True)
        self._thread.start()

    def admit(self, owned: Owned) -> None:
        """Write the batches submitted from now on: this master owns the catalog. `owned` must differ from former
        values."""
        with self._wake:
            self._owned = owned
            self._has_more = True
            self._wake.notify()

    def refuse(self, why: KVStoreError) -> None:
        """Fail queued and later batches with StaleEpoch, until the next `admit`. One write may still be under way."""
        with self._wake:
            self._owned = None
            self._refusal = why if isinstance(why, StaleEpoch) else StaleEpoch(str(why))
            self._outage = None
            self._wake.notify()

    def submit(self, changes: Sequence[Change], done: Done) -> None:
        """Queue a batch; see Catalog.commit. Raises InvalidArgument for a change over the limits; then nothing is
        queued."""
        check_changes(changes)
        with self._wake:
            closed = self._closing
            if not closed:
                self._queue.append((changes, done, self._owned))
                self._wake.notify()
        if closed:
            _call_done(done, Closed("the catalog is closed"))

    @property
    def is_admitted(self) -> bool:
        """True between `admit` and `refuse`."""
        return self._owned is not None

    @property
    def health(self) -> str:
        began_s = self._began_s
        if self._outage is None:
            took_s = 0.0 if began_s is None else time.monotonic() - began_s
            return "ok" if took_s < SLOW_COMMIT_S else f"a commit has been under way for {took_s:.1f} s ({len(self._queue)} wait behind it)"
        return f"{self._outage} ({len(self._queue)} commits wait behind it)"

    def written(self, size_bytes: int) -> CommitStats:
        """Return the statistics. `size_bytes` is the size of the catalog's storage."""
        return CommitStats(self._durations.counts(), len(self._queue), size_bytes)

    def close(self) -> None:
        """Accept no more batches, try once more to write the queue, fail the rest with Closed, and join the thread.
        Idempotent."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        if self._thread is None:
            self._closed = Closed("the catalog was closed before it was opened")
            self._run()
            return
        self._thread.join(LAST_TRY_S)
        if self._thread.is_alive():
            self._interrupt()
            self._thread.join()

    def _run(self) -> None:
        while True:
            group, began_s = self._take_group(), time.monotonic()
            if group:
                self._began_s = began_s = time.monotonic()
                error = self._commit([change for changes, _done, _owned in group for change in changes], group[0][2])
                self._began_s = None
                self._durations.record(round((time.monotonic() - began_s) * 1e9))
                for _changes, done, _owned in group:
                    _call_done(done, error)
            elif self._closing:
                return
            self._work(time.monotonic() + (time.monotonic() - began_s) / 2)

    def _work(self, until_s: float) -> None:
        """Do background steps, at least one, until `until_s`."""
        owned, self._has_more = self._owned, True
        while self._has_more and owned is not None and not self._closing:
            try:
                self._has_more = self._background(owned)
            except StaleEpoch as fenced:
                self._has_more = False
                self._stale(fenced, owned)
            except Exception as error:
                self._has_more = False
                LOG.warning("catalog: not merged for now: %s", error)
            if time.monotonic() >= until_s:
                return
        self._has_more = False

    def _stale(self, fenced: StaleEpoch, owned: Owned) -> None:
        LOG.warning("catalog: %s", fenced)
        if owned is self._owned:
            self.refuse(fenced)
            self._on_stale(fenced)

    def _take_group(self) -> list[_Batch[Owned]]:
        """Return the oldest batches of one ownership, up to a group's limits. Empty if closed and drained, or for
        background work."""
        group: list[_Batch[Owned]] = []
        op_count = size_bytes = 0
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closing or self._has_more)
            while self._queue and op_count < MAX_GROUP_OPS and size_bytes < MAX_GROUP_BYTES:
                if group and self._queue[0][2] is not group[0][2]:
                    break
                group.append(self._queue.popleft())
                for change in group[-1][0]:
                    if isinstance(change, Op):
                        op_count += 1
                        size_bytes += len(change.key) + len(change.value or b"")
                    else:
                        op_count += len(change.keys)
        return group

    def _commit(self, changes: Sequence[Change], owned: Owned | None) -> KVStoreError | None:
        """Write, with retries. Return None, or the reason that the changes can never be written."""
        while self._closed is None:
            if owned is None or owned is not self._owned:
                return self._refusal
            try:
                self._write(changes, owned)
            except StaleEpoch as fenced:
                self._stale(fenced, owned)
            except Exception as error:
                self._note(str(error))
                self._pause(owned)
            else:
                self._note(None)
                self._backoff.reset()
                return None
        return self._closed

    def _pause(self, owned: Owned) -> None:
        """Wait for the next attempt. During `close` the failed attempt was the last one."""
        with self._wake:
            if self._closing:
                self._closed = Closed(f"the catalog was closed while it could not be written: {self._outage}")
            else:
                self._wake.wait_for(lambda: self._closing or owned is not self._owned, self._backoff.next_s())

    def _note(self, problem: str | None) -> None:
        """Record the outage that `health` reports; log only its begin and end."""
        before, self._outage = self._outage, problem
        if problem is not None and before is None:
            LOG.warning("catalog: %s", problem)
        elif problem is None and before is not None:
            LOG.warning("catalog: takes writes again")


def check_changes(changes: Sequence[Change]) -> None:
    """Raise InvalidArgument for a change over the limits. Once queued, it would be refused for ever and block the
    queue."""
    for change in changes:
        if isinstance(change, Op):
            _check_op(change)
        elif change.keys:
            _check_texts("a block's key", 1, MAX_TEXT_BYTES, change.keys)
            _check_texts("a tenant's name", 0, MAX_TENANT_BYTES, (change.tenant.encode(),))
            if isinstance(change, BlockPuts):
                _check_puts(change)


def _check_op(op: Op) -> None:
    if not 0 < len(op.key) <= MAX_KEY_BYTES:
        raise InvalidArgument(f"a catalog key has 1 to {MAX_KEY_BYTES} bytes, not {len(op.key)}")
    if op.value is not None and len(op.value) > MAX_VALUE_BYTES:
        raise InvalidArgument(f"a catalog value has at most {MAX_VALUE_BYTES} bytes, not {len(op.value)}")


def _check_puts(puts: BlockPuts) -> None:
    if set(map(len, puts[2:])) != {len(puts.keys)}:
        raise InvalidArgument("the columns of a catalog's change differ in length")
    _check_texts("a block's parent", 0, MAX_TEXT_BYTES, puts.parents)
    _check_texts("a block's namespace", 0, MAX_TEXT_BYTES, [namespace.encode() for namespace in set(puts.namespaces)])
    numbers = puts.sizes, puts.checksums, puts.generations
    if min(map(min, numbers)) < 0 or max(map(max, numbers)) >= 1 << 64:
        raise InvalidArgument("a block's size, checksum and generation are below 2**64")
    for holders in set(puts.holders):
        if len(holders) > MAX_HOLDERS or (holders and (min(holders) < 0 or max(holders) >= 1 << 32)):
            raise InvalidArgument(f"a block has at most {MAX_HOLDERS} holders, numbers below 2**32")


def _check_texts(name: str, shortest: int, longest: int, texts: Sequence[bytes]) -> None:
    lengths = set(map(len, texts))
    if not shortest <= min(lengths) <= max(lengths) <= longest:
        raise InvalidArgument(f"{name} is {shortest} to {longest} bytes long, not {min(lengths)} to {max(lengths)}")


def _call_done(done: Done, error: KVStoreError | None) -> None:
    """Call `done`. An exception from it must not stop other commits."""
    try:
        done(error)
    except Exception:
        LOG.exception("catalog: a commit's callback raised")


class Committer:
    """Commits of one epoch, with callbacks in the loop. Not thread-safe: the loop is the only caller."""

    def __init__(self, reactor: Reactor, catalog: Catalog) -> None:
        self._reactor = reactor
        self._catalog = catalog
        self._is_over = False

    def commit(self, changes: Sequence[Change], then: Callable[[], None] = lambda: None) -> None:
        """Call `then` in the loop once `changes`, and all earlier commits, are durable; never if they cannot become
        durable.

        An empty commit keeps the order of `then`. Does nothing after `end`."""
        if self._is_over:
            return
        loop_thread = threading.get_ident()

        def done(error: KVStoreError | None) -> None:
            if threading.get_ident() == loop_thread:
                self._committed(error, then)  # the memory catalog calls `done` within `commit`
            else:
                self._reactor.call_soon(lambda: self._committed(error, then))

        self._catalog.commit(changes, done)

    def end(self) -> None:
        """End the epoch: commit no more, and drop pending callbacks. Otherwise changes of this epoch could be
        written in a later one, after a re-election."""
        self._is_over = True

    def _committed(self, error: KVStoreError | None, then: Callable[[], None]) -> None:
        if error is None and not self._is_over:
            then()
