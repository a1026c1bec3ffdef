"""What tenants want beyond a partition's share of their limits: others are asked for some of theirs, and who wants it waits for a moment.

Only who would be refused waits, and holds up nobody else. Who has waited in vain is refused, and for a while after that so is at once who
wants the same: others have been asked, and are again. The loop is the only caller.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from kvstore.master.catalogs.committing import Committer
from kvstore.master.catalogs.interface import Op
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.lending import Lending
from kvstore.protocol.errors import KVStoreError, QuotaExceeded
from kvstore.protocol.frames import Header
from kvstore.rpc.session import Session

WAIT_NS: Final = 1_000_000_000
"""For others to give: two commits, and a tick of each master, some 0.3 s."""
QUIET_NS: Final = 1_000_000_000
"""After somebody has waited in vain: so long nobody waits for the same."""
MAX_WAITING: Final = 1024
"""Wishes, which are looked at ten times a second. Who comes beyond is refused at once."""
MAX_WAITING_KEYS: Final = 1 << 15
"""Of all that wait. What can be had now takes some milliseconds then."""


class Wish(NamedTuple):
    """For `wanted` more of a tenant's limit (by its place in quota.SHARED) at most, which `act` takes. It raises KVStoreError, and what it
    does later is the answer."""

    tenant: str
    limit: int
    wanted: int
    act: Callable[[], None]
    refuse: Callable[[KVStoreError], None]
    """Told what `act` raised."""
    is_wanted: Callable[[], bool]
    end: Callable[[str], None]
    """Told why nobody acts any more: this master owns the partition no longer."""


class _Waiting(NamedTuple):
    wish: Wish
    until_ns: int
    error: QuotaExceeded
    """What it was refused for."""


class Borrowing:
    """See the module."""

    def __init__(self, directory: Directory, lending: Lending, committer: Committer, *, now_ns: Callable[[], int]) -> None:
        """`now_ns`: the loop's clock."""
        self._now_ns = now_ns
        self._directory = directory
        self._lending = lending
        self._committer = committer
        self._waiting: list[_Waiting] = []
        self._waiting_keys = 0
        self._vain_ns: dict[tuple[str, int], int] = {}
        """Until when nobody waits, by tenant and limit."""

    def attempt(self, wish: Wish) -> None:
        """Act; where that takes more than this partition's share of the limit, again while others may give some."""
        try:
            wish.act()
        except QuotaExceeded as error:
            now_ns = self._now_ns()
            if self._may_wait(wish, now_ns):
                self._keep(_Waiting(wish, now_ns + WAIT_NS, error))
            else:
                wish.refuse(error)
        except KVStoreError as error:
            wish.refuse(error)

    def attempt_for(self, session: Session, header: Header, tenant: str, limit: int, wanted: int, act: Callable[[], None]) -> None:
        """As `attempt`: what a client has asked for."""
        refuse = partial(session.fail, header.request_id)
        self.attempt(Wish(tenant, limit, wanted, act, refuse, is_wanted=lambda: session.is_open, end=session.close))

    def tick(self, now_ns: int) -> None:
        """Give others what they ask for, and look who need not wait any more: those who wait for the same in their order, and once one of
        them is refused only who wants less."""
        self._commit(self._lending.give(self._directory.taken, now_ns))
        self._vain_ns = {which: until_ns for which, until_ns in self._vain_ns.items() if now_ns < until_ns}
        refused: dict[tuple[str, int], int] = {}
        for waiting in self._take():
            if waiting.wish.is_wanted():
                self._try(waiting, refused, now_ns)
        wanted: dict[tuple[str, int], int] = {}
        for waiting in self._waiting:
            which = waiting.wish.tenant, waiting.wish.limit
            wanted[which] = max(wanted.get(which, 0), waiting.wish.wanted)
        for (tenant, limit), count in wanted.items():
            self._ask(tenant, limit, count, now_ns)

    def end(self, why: str) -> None:
        """This master owns it no longer: who waits is told, and looks for the next owner."""
        for waiting in self._take():
            waiting.wish.end(why)

    def _try(self, waiting: _Waiting, refused: dict[tuple[str, int], int], now_ns: int) -> None:
        """`refused`: what was too much in this tick, by tenant and limit."""
        wish, which, error = waiting.wish, (waiting.wish.tenant, waiting.wish.limit), waiting.error
        try:
            if which not in refused or wish.wanted < refused[which]:
                wish.act()
                return
        except QuotaExceeded as too_much:
            refused[which], error = wish.wanted, too_much
        except KVStoreError as other:
            wish.refuse(other)
            return
        if now_ns < waiting.until_ns:
            self._keep(waiting)
        else:
            self._vain_ns[which] = now_ns + QUIET_NS
            wish.refuse(error)

    def _keep(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._waiting_keys += waiting.wish.wanted

    def _take(self) -> list[_Waiting]:
        taken, self._waiting, self._waiting_keys = self._waiting, [], 0
        return taken

    def _may_wait(self, wish: Wish, now_ns: int) -> bool:
        self._ask(wish.tenant, wish.limit, wish.wanted, now_ns)
        is_vain = now_ns < self._vain_ns.get((wish.tenant, wish.limit), 0)
        has_place = len(self._waiting) < MAX_WAITING and self._waiting_keys + wish.wanted <= MAX_WAITING_KEYS
        return has_place and not is_vain and self._lending.may_grow(wish.tenant, wish.limit, wish.wanted)

    def _ask(self, tenant: str, limit: int, wanted: int, now_ns: int) -> None:
        used = self._directory.taken(tenant)[limit]
        self._commit(self._lending.ask(tenant, limit, wanted, used, now_ns))

    def _commit(self, ops: list[Op]) -> None:
        if ops:
            loans = self._lending.now
            self._committer.commit(ops, lambda: self._lending.written(loans))
