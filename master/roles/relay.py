"""From the catalog's thread to the event loop: what a catalog tells its follower is carried over, one call at a time, in order.

The catalog's thread waits until the loop has taken a call in: so what is not taken in yet waits in the catalog and not in memory.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from kvstore.master.catalogs.interface import Change, Follower, Owner
from kvstore.protocol.errors import KVStoreError, typed
from kvstore.rpc.reactor import Reactor

log = logging.getLogger("kvstore.master")


class Relay:
    """A catalog's Follower, which has another one called in the loop's thread. `close` belongs to that thread."""

    def __init__(self, reactor: Reactor, follower: Follower, *, on_failure: Callable[[KVStoreError], None]) -> None:
        """`on_failure` is called in the loop's thread when the follower does not take what it is told, such as a record that is damaged, or
        any, there being no memory: else nobody would know that it lacks that. Nothing is carried over after that."""
        self._reactor = reactor
        self._follower = follower
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting = threading.Event()

    def begin(self) -> None:
        self._carry(self._follower.begin)

    def take(self, changes: Sequence[Change]) -> None:
        self._carry(lambda: self._follower.take(changes))

    def owned_by(self, owner: Owner | None) -> None:
        self._carry(lambda: self._follower.owned_by(owner))

    def elected(self, epoch: int) -> None:
        self._carry(lambda: self._follower.elected(epoch))

    def deposed(self, why: KVStoreError) -> None:
        self._carry(lambda: self._follower.deposed(why))

    def close(self) -> None:
        """Carry nothing any more; a call that waits returns, so that the catalog's thread can be joined from the loop's."""
        with self._lock:
            self._is_closed = True
            self._waiting.set()

    def _carry(self, call: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                if not self._is_closed:
                    call()
            except Exception as error:
                self.close()
                if not isinstance(error, KVStoreError):
                    log.exception("what the catalog told was not taken")
                self._on_failure(typed(error))
            finally:
                done.set()

        with self._lock:
            if self._is_closed:
                return
            self._waiting = done
        self._reactor.call_soon(run)
        done.wait()  # for as long as the loop takes; `close` ends it
