"""Something done again and again beside what a test does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(act: Callable[[], None], *, every_s: float = 0.0) -> Iterator[None]:
    """Inside, in a thread of its own, with a pause after each time; the last one is over when this ends. It raises nothing."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
