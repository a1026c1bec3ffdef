"""From the event loop to the catalog and back: what was committed is told in the loop's thread, in order."""

import logging
import threading
from collections.abc import Callable, Sequence

from kvstore.master.catalogs.interface import Catalog, Change
from kvstore.protocol.errors import Closed, KVStoreError
from kvstore.rpc.reactor import Reactor

log = logging.getLogger("kvstore.master")


class Committer:
    """Not thread-safe: the loop is the only caller. `on_fenced` is called once when another master has taken the catalog over."""

    def __init__(self, reactor: Reactor, catalog: Catalog, *, on_fenced: Callable[[KVStoreError], None]) -> None:
        self._reactor = reactor
        self._catalog = catalog
        self._on_fenced = on_fenced
        self._is_fenced = False

    def commit(self, changes: Sequence[Change], then: Callable[[], None] = lambda: None) -> None:
        """Call `then` in the loop when `changes`, and all that was committed before, are durable; never if they cannot be any more.

        No changes are committed too: `then` keeps its place in the order.
        """
        loop_thread = threading.get_ident()

        def done(error: KVStoreError | None) -> None:
            if threading.get_ident() == loop_thread:
                self._committed(error, then)  # the memory catalog answers at once
            else:
                self._reactor.call_soon(lambda: self._committed(error, then))

        self._catalog.commit(changes, done)

    def _committed(self, error: KVStoreError | None, then: Callable[[], None]) -> None:
        if error is None:
            then()
        elif not isinstance(error, Closed) and not self._is_fenced:
            self._is_fenced = True
            log.error("the catalog refuses this master: %s", error)
            self._on_fenced(error)
