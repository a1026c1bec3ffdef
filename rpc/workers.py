"""Work for a pool of threads that is done once or not at all, also where the system has no thread left.

`ThreadPoolExecutor.submit` raises where it cannot start a thread, and keeps what it was given all the same: whichever of its threads is
free next does it, behind the back of who has been refused.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future


def submit_once(pool: Executor, work: Callable[[], object]) -> "Future[None] | None":
    """Have a thread of the pool do `work` in its turn; what that raises is lost. None: the pool is closed, or has no thread, and does
    not do it later either. `cancel` of what is returned takes it back, unless it has begun."""
    turn: Future[None] = Future()

    def run() -> None:
        if turn.set_running_or_notify_cancel():
            work()

    try:
        pool.submit(run)
    except RuntimeError:
        if turn.cancel():
            return None
    return turn
