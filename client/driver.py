"""Runs a blocking client's operations, effect by effect, on a pool of channels.

Gathered operations run in one thread: while one waits for its peer, the others proceed. An effect that waits for a peer
is started and polled: a request and its reply, payloads, copies by the transfer engine's threads. All other effects run
at once, and block.
"""

import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from kvstore.client.connections.reservations import CLEANUP_S
from kvstore.client.core.effects import (
    AcquireConnectionEffect,
    AnyChannel,
    Effect,
    GatherEffect,
    Operation,
    ReadPayloadEffect,
    ReceiveEffect,
    RequestEffect,
    RequestFdsEffect,
    RunInThreadEffect,
    SendEffect,
    SendOneWayEffect,
    SleepEffect,
    SpawnEffect,
    TransferEffect,
    drive,
)
from kvstore.client.operations import Operations
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.connection_pool import ConnectionPool
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.memory.signal_safety import Shield, begin_thread

if TYPE_CHECKING:
    from kvstore.transfer.paths.transfers import Transfer


Do = Callable[[Effect], Any]
"""Runs an effect: its result, or raises."""
LONGEST_POLL_MS: Final = 60_000


def run_gathered(operations: Sequence[Operation[Any]], do: Do) -> list[Any]:
    """Run operations concurrently in this thread: their results, in order.

    The first error ends all of them, as does an exception of a signal handler. It is raised once nothing of them is in
    flight.
    """
    waker = _Waker()
    parts = [_RunningOperation(operation, do, waker) for operation in operations]
    try:
        for part in parts:
            part.advance()  # up to its first request: connecting for it can be interrupted by signals
        with Shield() as shield:
            shield.cancels(waker.wake)
            try:
                while shield.raised is None and (waiting := [part for part in parts if part.wait is not None]):
                    _next_round(waiting, waker)
            finally:
                for part in parts:
                    try:
                        part.abandon()
                    except BaseException as error:  # of a signal handler: the others must be abandoned as well
                        shield.defer(error)
    finally:
        for part in parts:
            part.operation.close()
    return [part.result for part in parts]


class _Waker:
    """Wakes the polling thread, through an eventfd that lives as long as its last user."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self, _: object = None) -> None:
        os.eventfd_write(self.fd, 1)

    def __del__(self) -> None:
        os.close(self.fd)


def _next_round(waiting: "Sequence[_RunningOperation]", waker: _Waker) -> None:
    """Poll until a peer replies, copies end or a deadline passes; then advance the operations concerned."""
    waits = [(part, part.wait) for part in waiting if part.wait is not None]
    poll = select.poll()
    poll.register(waker.fd, select.POLLIN)
    for _, wait in waits:
        if wait.fd >= 0:
            poll.register(wait.fd, select.POLLIN)
    left_ns = min(wait.until_ns for _, wait in waits) - time.monotonic_ns()
    is_ready = any(wait.is_ready for _, wait in waits)
    ready = {fd for fd, _ in poll.poll(0 if is_ready else min(LONGEST_POLL_MS, max(0, left_ns) // 1_000_000 + 1))}
    if waker.fd in ready:
        os.eventfd_read(waker.fd)
    for part, wait in waits:
        if wait.is_ready or wait.fd in ready:
            part.proceed(wait.proceed)
        elif wait.until_ns <= time.monotonic_ns():
            part.proceed(wait.expire)


class _RunningOperation:
    """One gathered operation. `wait` is its pending effect, None once it is over."""

    def __init__(self, operation: Operation[Any], do: Do, waker: _Waker) -> None:
        self.operation = operation
        self.wait: _Wait | None = None
        self.result: Any = None
        self._do = do
        self._waker = waker

    def proceed(self, step: Callable[[], Any]) -> None:
        """Take a step of the pending effect, and continue if it is complete. Raises what the operation raises."""
        try:
            result = step()
        except BaseException as error:
            self.advance(error=error)
        else:
            if result is not _NOT_YET:
                self.advance(result)

    def abandon(self) -> None:
        """Stop waiting; returns when nothing of it is in flight."""
        if self.wait is not None:
            self.wait.abandon()

    def advance(self, result: Any = None, error: BaseException | None = None) -> None:
        """Run until the next pending effect. Raises what the operation raises."""
        self.wait = None
        while self.wait is None:
            try:
                effect = self.operation.send(result) if error is None else self.operation.throw(error)
            except StopIteration as end:
                self.result = end.value
                return
            finally:
                error = None  # its traceback refers to this frame
            try:
                self.wait = self._begin(effect)
                result, error = None if self.wait is not None else self._do(effect), None
            except BaseException as failure:
                result, error = None, failure

    def _begin(self, effect: Effect) -> "_Wait | None":
        match effect:
            case RequestEffect():
                return _AnswerWait(effect)
            case ReceiveEffect():
                return _PatientWait(effect)
            case ReadPayloadEffect():
                return _ValuesWait(effect)
            case TransferEffect():
                return _CopiesWait(effect, self._waker)
        return None


_NOT_YET: Final = object()


class _Wait(ABC):
    """A pending effect. `is_ready`: it can proceed without polling; `fd` is polled, unless -1."""

    fd = -1
    is_ready = False

    def __init__(self, deadline: Deadline) -> None:
        self.until_ns = deadline.at_ns
        self._deadline = deadline

    @abstractmethod
    def proceed(self) -> Any:
        """Take what has arrived: the effect's result, or _NOT_YET. Raises as the effect."""

    @abstractmethod
    def expire(self) -> Any:
        """As `proceed`, after the deadline."""

    def abandon(self) -> None:
        """Stop waiting; returns when nothing is in flight."""


class _ChannelWait(_Wait):
    """Wait for data on a channel."""

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        super().__init__(deadline)
        self.fd = channel.fileno()
        self._channel = channel

    def expire(self) -> Any:
        self._channel.close()
        raise self._deadline.exceeded()


class _AnswerWait(_ChannelWait):
    """Wait for the reply to a request."""

    def __init__(self, ask: RequestEffect) -> None:
        """Send the request; raises as the effect."""
        channel = cast(Channel, ask.channel)
        channel.ask(ask.message, ask.deadline, ask.payload)
        super().__init__(channel, ask.deadline)
        self._kind = ask.answer

    def proceed(self) -> Any:
        answer = self._channel.take_answer(self._kind)
        return _NOT_YET if answer is None else answer


class _PatientWait(_ChannelWait):
    """Wait for a reply that may be awaited again after its deadline."""

    def __init__(self, awaiting: ReceiveEffect) -> None:
        super().__init__(cast(Channel, awaiting.channel), awaiting.until)
        self._kind = awaiting.answer
        self.is_ready = True  # the reply may have arrived already

    def proceed(self) -> Any:
        self.is_ready = False
        answer = self._channel.take_answer(self._kind)
        return _NOT_YET if answer is None else answer

    def expire(self) -> None:
        """Result None: no reply yet."""


class _ValuesWait(_ChannelWait):
    """Wait for a reply's payload."""

    def __init__(self, fill: ReadPayloadEffect) -> None:
        super().__init__(cast(Channel, fill.channel), fill.deadline)
        self._pending: deque[memoryview] = self._channel.values_into(fill.destinations)
        self.is_ready = True  # some may have arrived with the reply

    def proceed(self) -> Any:
        self.is_ready = False
        return None if self._channel.take_values(self._pending) else _NOT_YET


class _CopiesWait(_Wait):
    """Wait for copies by the transfer engine, which begin with the first `proceed`."""

    def __init__(self, move: TransferEffect, waker: _Waker) -> None:
        super().__init__(move.deadline)
        self._move = move
        self._waker = waker
        self._transfer: Transfer | None = None

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self._transfer is None or self._transfer.is_over

    def proceed(self) -> Any:
        if self._transfer is None:
            move = self._move
            self._transfer = move.engine.submit(move.copies, deadline_s=self._deadline.left_s(), on_done=self._waker.wake)
            return _NOT_YET
        self._transfer.check()
        return None

    def expire(self) -> Any:
        """Expire the transfer, which then ends soon."""
        assert self._transfer is not None
        self._transfer.expire()
        self.until_ns += LONGEST_POLL_MS * 1_000_000
        return _NOT_YET

    def abandon(self) -> None:
        if self._transfer is not None:
            self._transfer.abandon()


T = TypeVar("T")


class Driver:
    """Runs operations of one Client. Thread-safe."""

    def __init__(self, operations: Operations) -> None:
        """Does no I/O: channels are opened by effects."""
        self._reservations = operations.resources.reservations
        resources = operations.resources
        self.pool = ConnectionPool(operations.hello, operations.settings, gil=resources.copier.gil, tls=resources.tls)
        self._cleanup: threading.Lock | None = None
        """Locked while a thread cancels reservations of interrupted puts."""

    def run(self, operation: Operation[T]) -> T:
        """Run the operation: its result. An exception of a signal handler is raised once nothing is in flight."""
        try:
            return drive(operation, self._do)
        finally:
            if self._reservations.unused:
                self._start_cleanup()

    def close(self) -> None:
        """Close all connections. Reservations of an interrupted put are cancelled first, if a master replies soon."""
        if (cleanup := self._cleanup) is not None and cleanup.acquire(timeout=CLEANUP_S):
            cleanup.release()
        self.pool.close()

    def _start_cleanup(self) -> None:
        """Cancel reservations of interrupted puts in a thread, so that the interrupted caller does not wait for
        daemons.

        One such thread runs at a time; without a thread the next call tries again.
        """
        if (cleanup := self._cleanup) is not None and cleanup.locked():
            return
        cancellation = self._reservations.cancel_all_unused()
        cleanup_lock = threading.Lock()
        cleanup_lock.acquire()

        def cancel_unused() -> None:
            try:
                self.run(cancellation)
            finally:
                cleanup_lock.release()

        self._cleanup = cleanup_lock  # before the thread starts: its own `run` ends here, too
        try:
            begin_thread(cancel_unused)
        except RuntimeError:
            self._cleanup = None
        except BaseException:  # of a signal handler: the thread may have started; a second one is harmless
            self._cleanup = None
            raise

    def _do(self, effect: Effect) -> Any:
        match effect:
            case RequestEffect():
                return _blocking(effect.channel).call(effect.message, effect.answer, effect.deadline, effect.payload)
            case SendEffect():
                return _blocking(effect.channel).ask(effect.message, effect.deadline)
            case ReceiveEffect():
                return _blocking(effect.channel).await_answer(effect.answer, effect.until)
            case AcquireConnectionEffect():
                return self.pool.take(effect.address, effect.deadline, effect.hello)
            case ReadPayloadEffect():
                return _blocking(effect.channel).read_into(effect.destinations, effect.deadline)
            case RunInThreadEffect():
                return effect.function()
            case TransferEffect():
                return effect.engine.transfer(effect.copies, deadline_s=effect.deadline.left_s())
            case SendOneWayEffect():
                return _blocking(effect.channel).post(effect.message)
            case RequestFdsEffect():
                return _blocking(effect.channel).call_for_fds(effect.message, effect.deadline)
            case SleepEffect():
                return time.sleep(effect.seconds)
            case SpawnEffect():
                return begin_thread(partial(self.run, effect.operation))
            case GatherEffect():
                return run_gathered(effect.operations, self._do)


def _blocking(channel: AnyChannel) -> Channel:
    return cast(Channel, channel)
