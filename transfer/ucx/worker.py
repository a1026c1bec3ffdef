"""UCX context and worker of a rail, shared by its connections in the process, and the threads that progress it.

UCX moves data only inside calls to its progress function. The threads that wait call it, one at a time
(leader/followers): the leader sleeps in epoll and wakes the others when their operations end. A background thread leads
only while no other waits, as it would cost two more thread switches per message. Nothing polls: UCX's event descriptor
is armed before every sleep.
"""

import atexit
import contextlib
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from kvstore.protocol.errors import Unreachable
from kvstore.transfer.ucx import library as ucx_library
from kvstore.transfer.ucx.library import open_context, resources

MAX_CONNECTION_ID: Final = (1 << 28) - 1
LINGER_S: Final = 0.001
"""While operations are frequent their own threads lead; remaining work of a finished send waits at most this long."""
CLOSE_TIMEOUT_S: Final = 5.0
CANCEL_TIMEOUT_S: Final = 1.0
ARM_TRIES: Final = 100
UNARMED_POLL_S: Final = 0.001
"""UCX cannot be armed while a message waits for space in shared memory, and sends no event when there is some. Usually
that is immediate; if the peer has stopped, this is the poll interval.
"""
PROGRESS_LIMIT: Final = 256
POST_BATCH: Final = 64
"""Messages posted before the lock is released to others."""
_FOREVER_S: Final = 3600.0


class ConnectionIds:
    """Allocator of connection numbers from 1 to `max_id`. Thread-safe."""

    def __init__(self, max_id: int = MAX_CONNECTION_ID) -> None:
        self._max_id = max_id
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._last_id = 0

    def take(self) -> int:
        """Allocate the number that was released longest ago, approximately."""
        with self._lock:
            while True:
                self._last_id = self._last_id % self._max_id + 1
                if self._last_id not in self._taken:
                    self._taken.add(self._last_id)
                    return self._last_id

    def release(self, connection_id: int) -> None:
        """Release a number. Idempotent."""
        with self._lock:
            self._taken.discard(connection_id)


class TaggedMessage(NamedTuple):
    """A message to send or receive: the endpoint's method, the memory, and the tag."""

    call: Callable[..., Any]
    part: memoryview | bytes
    tag: int


class UcxOperation:
    """Messages posted together. Guarded by the worker's lock."""

    __slots__ = ("error", "is_interrupted", "messages", "requests", "waiters", "wakeups")

    def __init__(self, messages: Sequence[TaggedMessage] = ()) -> None:
        self.messages = messages
        self.requests: deque[Any] = deque()
        """Posted requests not known to be over, the oldest on the right."""
        self.error: Exception | None = None
        """The first failure."""
        self.is_interrupted = False
        """Its waiting thread must return."""
        self.waiters = 0
        """Threads that sleep until it is over, or until they are to lead."""
        self.wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def settle(self, failures: type[Exception]) -> bool:
        """Remove completed requests; returns whether all are."""
        requests = self.requests
        while requests and requests[-1].completed:
            try:
                requests.pop().check_error()
            except failures as error:
                self.error = self.error or error
        return not requests


class UcxWorker:
    """A UCX worker with its connections. Thread-safe. Reference-counted by `acquire` and `release`; the last release
    closes it.
    """

    _shared: ClassVar[dict[str, "UcxWorker"]] = {}
    _shared_lock: ClassVar = threading.Lock()
    _abandoned: ClassVar[list[Any]] = []
    """Never touched again, not even to be destroyed, as that would move bytes."""

    @classmethod
    def acquire(cls, device: str) -> "UcxWorker":
        """Return the worker of a device, "" for any. Raises ConfigError: no ucxx, or no such device."""
        with cls._shared_lock:
            worker = cls._shared.get(device)
            if worker is None:
                worker = cls._shared[device] = UcxWorker(device)
            worker._users += 1
            return worker

    def release(self) -> None:
        """Drop one reference."""
        with self._shared_lock:
            self._users -= 1
            if self._users:
                return
            self._retire()
        self.close()

    def _retire(self) -> None:
        if self._shared.get(self.device) is self:
            del self._shared[self.device]

    def __init__(self, device: str) -> None:
        self.device = device
        self._users = 0
        self.api = ucx_library.bindings()
        self._array = ucx_library.array_class()
        self._context, self._worker = open_context(self.api, device)
        self.address: bytes = self._worker.address.tobytes()
        self.connection_ids = ConnectionIds()
        self._lock = threading.Lock()
        self._leadership = threading.Lock()
        self._leading: UcxOperation | None = None
        self._waiting: dict[UcxOperation, None] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._times_led = 0
        self._is_armed = False
        self._is_parked = False
        self._is_closed = False
        self._is_abandoned = False
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup_fd, select.EPOLLIN)
        self._epoll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._background = UcxOperation()
        self._thread = threading.Thread(target=self._run, name="kvstore-ucx", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._epoll.close()
            os.close(self._wakeup_fd)
            raise Unreachable(f"no thread can be started for UCX: {error}") from None
        atexit.register(self.close)  # a thread inside UCX would crash at interpreter exit

    def resources(self) -> list[str]:
        """Return its transports and devices, TRANSPORT/DEVICE."""
        return resources(self._context.info)

    # --- endpoints ---

    def endpoint(self, address: bytes) -> Any:
        """Return an endpoint to the worker with this address. Raises Unreachable."""
        with self._lock:
            self._check_open()
            try:
                there = self.api.UCXAddress.create_from_buffer(address)
                return self._worker.create_endpoint_from_worker_address(there, True)  # with error handling
            except (self.api.UCXError, RuntimeError) as error:
                raise Unreachable(f"UCX has no way to the peer: {error}; both ends need transports in common") from None

    def close_endpoint(self, endpoint: Any) -> None:
        """Close an endpoint without waiting for its peer."""
        with self._lock:
            if self._is_abandoned:
                self._abandoned.append(endpoint)
            else:
                endpoint.close_blocking()
            self._advance(None)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` in the leader's thread when `fd` is readable. It must not block, nor call the worker's
        `release`.
        """
        with self._lock:
            self._check_open()
            self._watched[fd] = callback
            self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching; call before `fd` is closed. A second call is a no-op."""
        with self._lock:
            if self._watched.pop(fd, None) is not None and not self._epoll.closed:
                self._epoll.unregister(fd)

    # --- operations ---

    def post(self, operation: UcxOperation) -> None:
        """Begin to move all messages of the operation. Raises Unreachable: the endpoint is broken, or the operation was
        interrupted.

        Their memory must stay until the operation is over or `finish` has returned.
        """
        array, tag_of = self._array, self.api.UCXXTag
        messages = operation.messages
        for begin in range(0, len(messages), POST_BATCH):
            with self._lock:
                self._check_open()
                if operation.is_interrupted:  # its endpoint may be closed: UCX would crash
                    raise Unreachable("the connection broke before the message was sent")
                self._waiting[operation] = None
                try:
                    for call, part, tag in messages[begin : begin + POST_BATCH]:
                        operation.requests.appendleft(call(array(part), tag_of(tag)))
                except (self.api.UCXError, RuntimeError) as error:
                    raise Unreachable(f"UCX refused a message: {error}") from None
                if self._leading is self._background:  # waiting threads lead with fewer switches
                    self._background.is_interrupted = True
                    os.eventfd_write(self._wakeup_fd, 1)
                if self._leading is not None:
                    self._advance(operation)

    def wait(self, operation: UcxOperation, timeout_s: float) -> None:
        """Block until the operation is over or interrupted, or the timeout. Raises Unreachable: the worker is closed."""
        end_s = time.monotonic() + timeout_s
        may_be_successor = False
        while operation.requests and not operation.is_interrupted:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            may_be_successor = not self._leadership.acquire(blocking=False)
            if may_be_successor:
                self._sleep(operation, left_s)
            else:
                self._lead(operation, end_s)
        if operation.requests or may_be_successor:
            with self._lock:
                if operation.requests:
                    self._check_open()
                self._pass_leadership(operation)

    def _sleep(self, operation: UcxOperation, timeout_s: float) -> None:
        """Sleep until the operation is over, this thread is to lead, or the timeout."""
        with self._lock:
            operation.waiters += 1
        try:
            if self._leadership.locked():  # from now on the leader sees this waiter
                with contextlib.suppress(queue.Empty):
                    operation.wakeups.get(timeout=timeout_s)
        finally:
            with self._lock:
                operation.waiters -= 1

    def flush(self) -> None:
        """Process what has arrived."""
        with self._lock:
            self._advance(None)

    def interrupt(self, operation: UcxOperation) -> None:
        """Make the operation's waiting thread return."""
        with self._lock:
            operation.is_interrupted = True
            self._wake(operation)

    def finish(self, operation: UcxOperation) -> None:
        """Stop all bytes of a failed operation whose endpoint was closed.

        If UCX does not return a message in time, the worker is abandoned with all its connections.
        """
        end_s = time.monotonic() + CANCEL_TIMEOUT_S
        while operation.requests and not self._is_closed:
            if time.monotonic() >= end_s:
                self.abandon()
                break
            operation.is_interrupted = False  # set by `interrupt`, for waiters that do not know the failure yet
            with contextlib.suppress(Unreachable):
                self.wait(operation, CANCEL_TIMEOUT_S)
        with self._lock:
            self._waiting.pop(operation, None)
            self._pass_leadership(operation)

    def abandon(self) -> None:
        """Never progress again, so that no byte in flight moves. Its connections fail; new ones get another worker."""
        with self._shared_lock:
            self._retire()
        with self._lock:
            self._is_abandoned = True
            self._abandoned.append((self._context, self._worker))
        self.close()

    # --- progress ---

    def _lead(self, operation: UcxOperation, end_s: float) -> None:
        """Progress the worker for all operations until this one is over, or the timeout. Called with the leadership,
        which it releases.
        """
        with self._lock:
            self._times_led += 1
            self._leading = operation
        try:
            while True:
                with self._lock:
                    if not self._advance(operation):
                        return
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return
                for fd, _ in self._epoll.poll(left_s if self._is_armed else min(left_s, UNARMED_POLL_S)):
                    self._on_event(fd)
        finally:
            with self._lock:
                self._leading = None
                self._leadership.release()
                self._pass_leadership(operation)

    def _pass_leadership(self, left: UcxOperation) -> None:
        """Wake a successor, now that this operation's thread does not lead: a waiting thread, else the background
        thread. With the lock held.
        """
        if self._leadership.locked():
            return
        successor = next((other for other in self._waiting if other is not left and other.waiters), None)
        if successor is not None:
            successor.wakeups.put(None)
        elif self._is_parked:
            self._is_parked = False
            self._background.wakeups.put(None)

    def _advance(self, ours: UcxOperation | None) -> bool:
        """Progress until UCX has nothing more to do; returns False as soon as our operation is over. With the lock
        held.
        """
        for _ in range(ARM_TRIES):
            if self._is_closed:
                return False
            # ucxx's `progress` loops while UCX reports progress, which never ends after some failures in shared memory.
            for _ in range(PROGRESS_LIMIT):
                if not self._worker.progress_once():
                    break
            self._worker.cancel_inflight_requests()  # of broken endpoints
            self._settle(ours)
            # The next leader progresses before it sleeps; one that sleeps already needs an armed worker to be woken.
            if self._leading in (None, ours) and self._is_over(ours):
                return False
            self._is_armed = self._worker.arm()
            if self._is_armed:
                return True
        if self._leading not in (None, ours):
            os.eventfd_write(self._wakeup_fd, 1)  # wake the leader: no event would
        return True

    def _is_over(self, operation: UcxOperation | None) -> bool:
        if operation is None or operation is self._background:
            return self._background.is_interrupted
        return operation.is_interrupted or not operation.requests

    def _settle(self, ours: UcxOperation | None) -> None:
        for operation in [operation for operation in self._waiting if operation.settle(self.api.UCXError)]:
            del self._waiting[operation]
            if operation is not ours:
                self._wake(operation)

    def _wake(self, operation: UcxOperation) -> None:
        if operation is self._leading:
            os.eventfd_write(self._wakeup_fd, 1)
        else:
            operation.wakeups.put(None)

    def _on_event(self, fd: int) -> None:
        if fd == self._wakeup_fd:
            os.eventfd_read(fd)
            return
        callback = self._watched.get(fd)
        if callback is not None:
            callback()

    def _run(self) -> None:
        """Background thread: leads while no other thread waits, and finally destroys UCX's objects, which may take
        long.
        """
        while not self._is_closed:
            seen = -1
            while seen != self._times_led and not self._is_closed:
                seen = self._times_led
                time.sleep(LINGER_S)
            with self._lock:
                leads = self._leadership.acquire(blocking=False)
                self._is_parked = not leads
                self._background.is_interrupted = False
            if leads:
                self._lead(self._background, time.monotonic() + _FOREVER_S)
            else:
                self._background.wakeups.get()
        with self._leadership, self._lock:
            self._epoll.close()
            os.close(self._wakeup_fd)
            del self._worker, self._context

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unreachable("the UCX worker of this rail is closed")

    def close(self) -> None:
        """Stop the thread, destroy UCX's objects and make waiting threads return. A second close is a no-op."""
        atexit.unregister(self.close)
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for operation in [*self._waiting, self._background]:
                operation.is_interrupted = True
                operation.wakeups.put(None)
            os.eventfd_write(self._wakeup_fd, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
