"""Detects reference cycles, which only Python's garbage collector can free."""

import gc
from collections import Counter
from collections.abc import Callable


def collected(generation: int = 2) -> Counter[str]:
    """Collect this generation and those below; return the number of unreachable objects by type."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect(generation)
    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect(min(generation + 1, 2))  # where they have moved to
    return found


def ours(found: Counter[str]) -> dict[str, int]:
    """Return the counts of kvstore's types, sockets and memory views: libraries leave cycles when they are imported or first used."""
    return {kind: count for kind, count in found.items() if kind.startswith(("kvstore.", "socket.", "builtins.memoryview"))}


def assert_no_garbage(act: Callable[[], None]) -> None:
    """Assert that `act` leaves no cycles. Older objects are not checked."""
    gc.collect(1)
    gc.disable()
    try:
        act()
        left = ours(collected(0))
    finally:
        gc.enable()
    assert not left, left
