"""Group commit: one thread makes durable, in one write, all that was queued during its previous write, then tells each caller.

It knows neither LMDB nor etcd: `write` is one attempt to make a map of changes durable. Under load groups grow by themselves, so
that a slow disk or a distant etcd costs latency but not throughput.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kvstore.master.catalogs.backoff import Backoff
from kvstore.master.catalogs.interface import Done, Op
from kvstore.protocol.errors import Closed, InvalidArgument, KVStoreError, StaleEpoch

LOG = logging.getLogger("kvstore.master")

MAX_KEY_BYTES = 400
MAX_VALUE_BYTES = 64 * 1024
MAX_GROUP_OPS = 16_384
MAX_GROUP_BYTES = 64 * 1024 * 1024
"""A group takes no further batch past either limit, so that what queued up during an outage is neither one transaction of
gigabytes nor one wait of minutes. A single batch larger than the limits is a group of its own."""
LAST_TRY_S = 1.0
"""What `close` grants a write under way before it is interrupted."""

Changes = Mapping[bytes, bytes | None]
"""Key -> its new value, or None to delete it."""

_Batch = tuple[Sequence[Op], Done]


class GroupCommit:
    """A queue of batches and the thread that writes them. `submit` and `health` may be called from any thread.

    `write(changes)` returns once all of them are durable. It raises StaleEpoch when another owner took over: this and every later
    batch fails with it. Whatever else it raises means "not known to be durable": the same changes are tried again after a
    back-off, so writing twice must be harmless. `interrupt`, called from another thread, makes a write under way fail soon.
    """

    def __init__(self, write: Callable[[Changes], None], *, backoff: Backoff, interrupt: Callable[[], None] = lambda: None) -> None:
        self._write = write
        self._interrupt = interrupt
        self._backoff = backoff
        self._queue: deque[_Batch] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._refusal: KVStoreError | None = None
        self._trouble: str | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="catalog-commit", daemon=True)
        self._thread.start()

    def submit(self, ops: Sequence[Op], done: Done) -> None:
        """Queue a batch; see Catalog.commit. Raises InvalidArgument when an operation is over the limits; nothing is queued then."""
        check_ops(ops)
        with self._wake:
            closed = self._closing
            if not closed:
                self._queue.append((ops, done))
                self._wake.notify()
        if closed:
            _tell(done, Closed("the catalog is closed"))

    @property
    def health(self) -> str:
        if self._trouble is None:
            return "ok"
        return f"{self._trouble} ({len(self._queue)} commits wait behind it)"

    def close(self) -> None:
        """Take no more batches, try once more what waits, fail the rest with Closed, and join the thread. A second call is a no-op."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        if self._thread is None:
            self._refusal = Closed("the catalog was closed before it was opened")
            self._run()
            return
        self._thread.join(LAST_TRY_S)
        if self._thread.is_alive():
            self._interrupt()
            self._thread.join()

    def _run(self) -> None:
        while group := self._take_group():
            error = self._commit({op.key: op.value for ops, _done in group for op in ops})
            for _ops, done in group:
                _tell(done, error)

    def _take_group(self) -> list[_Batch]:
        """The oldest batches, up to the limits of a group; none once closed and drained."""
        group: list[_Batch] = []
        op_count = size_bytes = 0
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closing)
            while self._queue and op_count < MAX_GROUP_OPS and size_bytes < MAX_GROUP_BYTES:
                group.append(self._queue.popleft())
                op_count += len(group[-1][0])
                size_bytes += sum(len(op.key) + len(op.value or b"") for op in group[-1][0])
        return group

    def _commit(self, changes: Changes) -> KVStoreError | None:
        """Write until it succeeds, or until there is a reason never to; the reason."""
        while self._refusal is None:
            try:
                self._write(changes)
            except StaleEpoch as fenced:
                self._note(str(fenced))
                self._refusal = fenced
            except Exception as error:
                self._note(str(error))
                self._pause()
            else:
                self._note(None)
                self._backoff.reset()
                return None
        return self._refusal

    def _pause(self) -> None:
        """Wait for the next try. A try that failed during `close` was the last one."""
        with self._wake:
            if self._closing:
                self._refusal = Closed(f"the catalog was closed while it could not be written: {self._trouble}")
            else:
                self._wake.wait_for(lambda: self._closing, self._backoff.next_s())

    def _note(self, trouble: str | None) -> None:
        """Keep what `health` tells; an operator's log gets the changes only, not every try."""
        before, self._trouble = self._trouble, trouble
        if trouble is not None and before is None:
            LOG.warning("catalog: %s", trouble)
        elif trouble is None and before is not None:
            LOG.warning("catalog: takes writes again")


def check_ops(ops: Sequence[Op]) -> None:
    """Raise InvalidArgument for a key or value outside Op's limits: once queued, it would be refused for ever and block the rest."""
    for op in ops:
        if not 0 < len(op.key) <= MAX_KEY_BYTES:
            raise InvalidArgument(f"a catalog key has 1 to {MAX_KEY_BYTES} bytes, not {len(op.key)}")
        if op.value is not None and len(op.value) > MAX_VALUE_BYTES:
            raise InvalidArgument(f"a catalog value has at most {MAX_VALUE_BYTES} bytes, not {len(op.value)}")


def _tell(done: Done, error: KVStoreError | None) -> None:
    """Call `done`; one that breaks its promise must not stop the commits of everybody else."""
    try:
        done(error)
    except Exception:
        LOG.exception("catalog: a commit's callback raised")
