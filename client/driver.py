"""Carries out a blocking client's operations, effect by effect, over its pool of channels."""

import threading
import time
from functools import partial
from typing import Any, TypeVar, cast

from kvstore.client.effects import (
    AnyChannel,
    Aside,
    Ask,
    AskForFds,
    Await,
    Effect,
    Fill,
    Later,
    Move,
    Operation,
    Post,
    Send,
    Sleep,
    Take,
    Together,
    Work,
    drive,
)
from kvstore.client.operations import Operations
from kvstore.client.reservations import CLEANUP_S
from kvstore.client.together import run_together
from kvstore.rpc.channel import Channel
from kvstore.rpc.pool import Pool
from kvstore.transfer.memory.gate import begin_thread

T = TypeVar("T")


class Driver:
    """Threads may share it."""

    def __init__(self, operations: Operations) -> None:
        """Does no I/O: channels are opened when effects want them."""
        self._reservations = operations.resources.reservations
        resources = operations.resources
        self.pool = Pool(operations.hello, operations.settings, gil=resources.copier.gil, tls=resources.tls)
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

        def give_back() -> None:
            try:
                self.run(giving_up)
            finally:
                is_at_work.release()

        self._tidying = is_at_work  # before the thread is there: its own run ends here, too
        try:
            begin_thread(give_back)
        except RuntimeError:
            self._tidying = None
        except BaseException:  # by a signal handler: the thread may be there or not, and two do no harm
            self._tidying = None
            raise

    def _do(self, effect: Effect) -> Any:
        match effect:
            case Ask():
                return _blocking(effect.channel).call(effect.message, effect.answer, effect.deadline, effect.payload)
            case Send():
                return _blocking(effect.channel).ask(effect.message, effect.deadline)
            case Await():
                return _blocking(effect.channel).await_answer(effect.answer, effect.until)
            case Take():
                return self.pool.take(effect.address, effect.deadline, effect.hello)
            case Fill():
                return _blocking(effect.channel).read_into(effect.destinations, effect.deadline)
            case Work():
                return effect.function()
            case Move():
                return effect.engine.transfer(effect.copies, deadline_s=effect.deadline.left_s())
            case Post():
                return _blocking(effect.channel).post(effect.message)
            case AskForFds():
                return _blocking(effect.channel).call_for_fds(effect.message, effect.deadline)
            case Sleep():
                return time.sleep(effect.seconds)
            case Later():
                return begin_thread(effect.function)
            case Aside():
                return begin_thread(partial(self.run, effect.operation))
            case Together():
                return run_together(effect.operations, self._do)


def _blocking(channel: AnyChannel) -> Channel:
    return cast(Channel, channel)
