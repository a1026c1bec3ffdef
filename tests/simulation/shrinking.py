"""A schedule that found something, cut down: steps are left out as long as the same kind of finding stays."""

from collections.abc import Callable

from tests.simulation.schedule import Schedule

Finds = Callable[[Schedule], str]
"""The kind of the first finding, "" for none."""


def shrink(schedule: Schedule, finds: Finds, *, max_runs: int = 400) -> Schedule:
    """Return the smallest schedule found in `max_runs` runs: remove halves of the steps first, then smaller parts, then single steps."""
    kind, runs = finds(schedule), 1
    if not kind:
        return schedule
    size = max(1, len(schedule.steps) // 2)
    while runs < max_runs:
        at, is_smaller = 0, False
        while at < len(schedule.steps) and runs < max_runs:
            smaller = schedule.without(set(range(at, at + size)))
            runs += 1
            if finds(smaller) == kind:
                schedule, is_smaller = smaller, True
            else:
                at += size
        if size == 1 and not is_smaller:
            break
        size = max(1, size // 2)
    return schedule
