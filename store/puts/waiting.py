"""Puts that wait for room, a line a tenant, first come first served, each until its deadline. Pure; `now_ns` is passed in."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Waiting:
    """`attempt` tries again and says whether it is done; `give_up` is called instead when the deadline is over. Neither raises."""

    tenant: str
    owner: object
    deadline_ns: int
    attempt: Callable[[], bool]
    give_up: Callable[[], None]


class WaitingRoom:
    """Of each tenant only the first in line is tried: a later, smaller request that overtakes could starve a large one for ever. Tenants
    do not wait for one another, for one's blocks under lease are no reason for another's to stay out; the one whose line is oldest is
    tried first."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Waiting]] = {}
        """None of them empty."""
        self._served: set[str] = set()
        """Tenants whose first in line is being tried right now."""

    def add(self, waiting: Waiting) -> None:
        self._lines.setdefault(waiting.tenant, deque()).append(waiting)

    def has(self, tenant: str) -> bool:
        """Whether anyone of the tenant waits: those who come now go behind."""
        return tenant in self._lines

    def retry(self) -> None:
        """Room may have been made: serve each line as far as it goes. An attempt may itself end connections, or call this again."""
        for tenant in list(self._lines):
            if tenant not in self._served:
                self._served.add(tenant)
                try:
                    self._serve(tenant)
                finally:
                    self._served.discard(tenant)

    def _serve(self, tenant: str) -> None:
        while line := self._lines.get(tenant):
            first = line[0]
            if not first.attempt():
                return
            if line and line[0] is first:  # else its owner has left meanwhile
                line.popleft()
                if not line:
                    del self._lines[tenant]

    def _keep(self, stays: Callable[[Waiting], bool]) -> None:
        for tenant, line in list(self._lines.items()):
            kept = [waiting for waiting in line if stays(waiting)]
            line.clear()
            line.extend(kept)
            if not line:
                del self._lines[tenant]

    def expire(self, *, now_ns: int) -> int:
        """Send away those whose deadline is over; returns how many."""
        late = [waiting for line in self._lines.values() for waiting in line if waiting.deadline_ns <= now_ns]
        self._keep(lambda waiting: waiting.deadline_ns > now_ns)
        for waiting in late:
            waiting.give_up()
        if late:
            self.retry()
        return len(late)

    def forget_owner(self, owner: object) -> None:
        """The asker is gone: nobody is told."""
        self._keep(lambda waiting: waiting.owner is not owner)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))
