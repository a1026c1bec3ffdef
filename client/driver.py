"""Carries out a blocking client's operations, effect by effect, over its pool of channels.

Several operations at once run in one thread: while one waits for its peer the others go on. Each is driven as it would be alone. What waits
for a peer is begun and left: a question is sent and its answer taken when it comes, values are read as they come, copies of the transfer
engine are made by its own threads. All else is carried out on the spot.
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
"""Carries out an effect and gives its result, or raises."""
LONGEST_POLL_MS: Final = 60_000


def run_together(operations: Sequence[Operation[Any]], do: Do) -> list[Any]:
    """Their results, in order. The first error ends them all, and so does whatever a signal handler raises: it is raised once nothing of
    theirs moves any more."""
    bell = _Waker()
    parts = [_RunningOperation(operation, do, bell) for operation in operations]
    try:
        for part in parts:
            part.advance()  # as far as its first question: who has to connect for it may be interrupted as ever
        with Shield() as shield:
            shield.cancels(bell.ring)
            try:
                while shield.raised is None and (waiting := [part for part in parts if part.wait is not None]):
                    _next_round(waiting, bell)
            finally:
                for part in parts:
                    try:
                        part.abandon()
                    except BaseException as error:  # of a handler that struck in there: the others are to be abandoned all the same
                        shield.defer(error)
    finally:
        for part in parts:
            part.operation.close()
    return [part.result for part in parts]


class _Waker:
    """Wakes the thread that polls. It lives as long as anyone may ring it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self, _: object = None) -> None:
        os.eventfd_write(self.fd, 1)

    def __del__(self) -> None:
        os.close(self.fd)


def _next_round(waiting: "Sequence[_RunningOperation]", bell: _Waker) -> None:
    """Wait until a peer has said something, copies are over, or a deadline is; and go on with those whom it concerns."""
    waits = [(part, part.wait) for part in waiting if part.wait is not None]
    poll = select.poll()
    poll.register(bell.fd, select.POLLIN)
    for _, wait in waits:
        if wait.fd >= 0:
            poll.register(wait.fd, select.POLLIN)
    left_ns = min(wait.until_ns for _, wait in waits) - time.monotonic_ns()
    is_ready = any(wait.is_ready for _, wait in waits)
    ready = {fd for fd, _ in poll.poll(0 if is_ready else min(LONGEST_POLL_MS, max(0, left_ns) // 1_000_000 + 1))}
    if bell.fd in ready:
        os.eventfd_read(bell.fd)
    for part, wait in waits:
        if wait.is_ready or wait.fd in ready:
            part.proceed(wait.proceed)
        elif wait.until_ns <= time.monotonic_ns():
            part.proceed(wait.expire)


class _RunningOperation:
    """One operation: `wait` is what it waits for, None once it is over."""

    def __init__(self, operation: Operation[Any], do: Do, bell: _Waker) -> None:
        self.operation = operation
        self.wait: _Wait | None = None
        self.result: Any = None
        self._do = do
        self._bell = bell

    def proceed(self, step: Callable[[], Any]) -> None:
        """Take a step of its wait, and go on if that was the last. Raises what the operation raises."""
        try:
            result = step()
        except BaseException as error:
            self.advance(error=error)
        else:
            if result is not _NOT_YET:
                self.advance(result)

    def abandon(self) -> None:
        """Nobody waits for it any more: return when nothing of it moves."""
        if self.wait is not None:
            self.wait.abandon()

    def advance(self, result: Any = None, error: BaseException | None = None) -> None:
        """Go on as far as the next wait. Raises what the operation raises."""
        self.wait = None
        while self.wait is None:
            try:
                effect = self.operation.send(result) if error is None else self.operation.throw(error)
            except StopIteration as end:
                self.result = end.value
                return
            finally:
                error = None  # its traceback has this frame
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
                return _CopiesWait(effect, self._bell)
        return None


_NOT_YET: Final = object()


class _Wait(ABC):
    """What an operation waits for. `is_ready`: it can proceed whatever is polled; `fd` is polled, if it is one."""

    fd = -1
    is_ready = False

    def __init__(self, deadline: Deadline) -> None:
        self.until_ns = deadline.at_ns
        self._deadline = deadline

    @abstractmethod
    def proceed(self) -> Any:
        """Take what has come: the effect's result, or _NOT_YET. Raises as the effect does."""

    @abstractmethod
    def expire(self) -> Any:
        """The deadline is over: as `proceed`."""

    def abandon(self) -> None:
        """Nobody waits any more: return when nothing moves."""


class _ChannelWait(_Wait):
    """For what comes by a channel."""

    def __init__(self, channel: Channel, deadline: Deadline) -> None:
        super().__init__(deadline)
        self.fd = channel.fileno()
        self._channel = channel

    def expire(self) -> Any:
        self._channel.close()
        raise self._deadline.exceeded()


class _AnswerWait(_ChannelWait):
    """For the answer to a question."""

    def __init__(self, ask: RequestEffect) -> None:
        """Asks it, and raises as the effect does."""
        channel = cast(Channel, ask.channel)
        channel.ask(ask.message, ask.deadline, ask.payload)
        super().__init__(channel, ask.deadline)
        self._kind = ask.answer

    def proceed(self) -> Any:
        answer = self._channel.take_answer(self._kind)
        return _NOT_YET if answer is None else answer


class _PatientWait(_ChannelWait):
    """For the answer to a question sent before, which may be awaited further."""

    def __init__(self, awaiting: ReceiveEffect) -> None:
        super().__init__(cast(Channel, awaiting.channel), awaiting.until)
        self._kind = awaiting.answer
        self.is_ready = True  # it may have come already

    def proceed(self) -> Any:
        self.is_ready = False
        answer = self._channel.take_answer(self._kind)
        return _NOT_YET if answer is None else answer

    def expire(self) -> None:
        """The operation is told that there is no answer yet."""


class _ValuesWait(_ChannelWait):
    """For an answer's values."""

    def __init__(self, fill: ReadPayloadEffect) -> None:
        super().__init__(cast(Channel, fill.channel), fill.deadline)
        self._pending: deque[memoryview] = self._channel.values_into(fill.destinations)
        self.is_ready = True  # some may have come along with the answer

    def proceed(self) -> Any:
        self.is_ready = False
        return None if self._channel.take_values(self._pending) else _NOT_YET


class _CopiesWait(_Wait):
    """For copies by the transfer engine. They begin with the first `proceed`."""

    def __init__(self, move: TransferEffect, bell: _Waker) -> None:
        super().__init__(move.deadline)
        self._move = move
        self._bell = bell
        self._transfer: Transfer | None = None

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self._transfer is None or self._transfer.is_over

    def proceed(self) -> Any:
        if self._transfer is None:
            move = self._move
            self._transfer = move.engine.submit(move.copies, deadline_s=self._deadline.left_s(), on_done=self._bell.ring)
            return _NOT_YET
        self._transfer.check()
        return None

    def expire(self) -> Any:
        """It ends soon, by itself."""
        assert self._transfer is not None
        self._transfer.expire()
        self.until_ns += LONGEST_POLL_MS * 1_000_000
        return _NOT_YET

    def abandon(self) -> None:
        if self._transfer is not None:
            self._transfer.abandon()


T = TypeVar("T")


class Driver:
    """Threads may share it."""

    def __init__(self, operations: Operations) -> None:
        """Does no I/O: channels are opened when effects want them."""
        self._reservations = operations.resources.reservations
        resources = operations.resources
        self.pool = ConnectionPool(operations.hello, operations.settings, gil=resources.copier.gil, tls=resources.tls)
        self._tidying: threading.Lock | None = None
        """Locked while a thread gives back what an interrupted put had reserved."""

    def run(self, operation: Operation[T]) -> T:
        """Its result, or what it raises; whatever a signal handler raises comes out once nothing of it moves any more."""
        try:
            return drive(operation, self._do)
        finally:
            if self._reservations.unused:
                self._tidy()

    def close(self) -> None:
        """Hang up. What an interrupted put had reserved is given back first, if a master answers soon."""
        if (tidying := self._tidying) is not None and tidying.acquire(timeout=CLEANUP_S):
            tidying.release()
        self.pool.close()

    def _tidy(self) -> None:
        """Give back what an interrupted put had reserved, in the background: whoever interrupted it does not wait for daemons. One thread
        is at it at a time, however many calls end meanwhile; where none can be had the next call tries again."""
        if (tidying := self._tidying) is not None and tidying.locked():
            return
        giving_up = self._reservations.give_up_unused()
        is_at_work = threading.Lock()
        is_at_work.acquire()

        def release() -> None:
            try:
                self.run(giving_up)
            finally:
                is_at_work.release()

        self._tidying = is_at_work  # before the thread is there: its own run ends here, too
        try:
            begin_thread(release)
        except RuntimeError:
            self._tidying = None
        except BaseException:  # by a signal handler: the thread may be there or not, and two do no harm
            self._tidying = None
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
                return run_together(effect.operations, self._do)


def _blocking(channel: AnyChannel) -> Channel:
    return cast(Channel, channel)
