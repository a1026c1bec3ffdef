"""A reactor that runs in a thread of its own, for tests of what belongs to one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.rpc.reactor import Reactor


@contextmanager
def running() -> Iterator[Reactor]:
    reactor = Reactor()
    thread = threading.Thread(target=reactor.run)
    thread.start()
    try:
        yield reactor
    finally:
        reactor.stop()
        thread.join()
        reactor.close()
