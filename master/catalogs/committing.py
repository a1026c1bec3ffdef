"""From the event loop to the catalog and back: what was committed is told in the loop's thread, in order."""

import threading
from collections.abc import Callable, Sequence

from kvstore.master.catalogs.interface import Catalog, Change
from kvstore.protocol.errors import KVStoreError
from kvstore.rpc.reactor import Reactor


class Committer:
    """The commits of one epoch. Not thread-safe: the loop is the only caller."""

    def __init__(self, reactor: Reactor, catalog: Catalog) -> None:
        self._reactor = reactor
        self._catalog = catalog
        self._is_over = False

    def commit(self, changes: Sequence[Change], then: Callable[[], None] = lambda: None) -> None:
        """Call `then` in the loop when `changes`, and all that was committed before, are durable; never if they cannot be any more.

        No changes are committed too: `then` keeps its place in the order. Does nothing after `end`.
        """
        if self._is_over:
            return
        loop_thread = threading.get_ident()

        def done(error: KVStoreError | None) -> None:
            if threading.get_ident() == loop_thread:
                self._committed(error, then)  # the memory catalog answers at once
            else:
                self._reactor.call_soon(lambda: self._committed(error, then))

        self._catalog.commit(changes, done)

    def end(self) -> None:
        """The epoch is over: nothing is committed any more, and nobody is told of what is under way. What is left of the epoch would else
        be written under a later one, should this master be elected again."""
        self._is_over = True

    def _committed(self, error: KVStoreError | None, then: Callable[[], None]) -> None:
        if error is None and not self._is_over:
            then()
