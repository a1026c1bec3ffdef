"""What only Python's collector can free: objects that refer to one another in a circle, and all that they hold."""

import gc
from collections import Counter
from collections.abc import Callable


def collected() -> Counter[str]:
    """How many objects of each kind there were of that sort; they are freed."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    return found


def ours(found: Counter[str]) -> dict[str, int]:
    """Those of kvstore, and what they hold of the system: libraries leave circles where they are imported, or first used."""
    return {kind: count for kind, count in found.items() if kind.startswith(("kvstore.", "socket.", "builtins.memoryview"))}


TRIES = 3
"""A master of an earlier test in this process may become garbage meanwhile, once a thread of gRPC's lets it go. `act` leaves what it leaves
each time."""


def assert_no_garbage(act: Callable[[], None]) -> None:
    """`act` leaves nothing to the collector."""
    left: dict[str, int] = {}
    for _try in range(TRIES):
        gc.collect()
        gc.disable()
        try:
            act()
            left = ours(collected())
        finally:
            gc.enable()
        if not left:
            return
    raise AssertionError(left)
