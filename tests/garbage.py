"""What only Python's collector can free: objects that refer to one another in a circle, and all that they hold."""

import gc
from collections import Counter
from collections.abc import Callable


def collected(generation: int = 2) -> Counter[str]:
    """How many objects of each kind there were of that sort, in this generation and those below; they are freed."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect(generation)
    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect(min(generation + 1, 2))  # where they have moved to
    return found


def ours(found: Counter[str]) -> dict[str, int]:
    """Those of kvstore, and what they hold of the system: libraries leave circles where they are imported, or first used."""
    return {kind: count for kind, count in found.items() if kind.startswith(("kvstore.", "socket.", "builtins.memoryview"))}


def assert_no_garbage(act: Callable[[], None]) -> None:
    """`act` leaves nothing to the collector. What is older than `act` is not looked at: that would be all that the tests have loaded."""
    gc.collect(1)
    gc.disable()
    try:
        act()
        left = ours(collected(0))
    finally:
        gc.enable()
    assert not left, left
