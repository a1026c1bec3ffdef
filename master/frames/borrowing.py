"""What tenants want beyond a partition's share of their limits: others are asked for some of theirs, and who wants it waits for a moment.

Only who would be refused waits, and holds up nobody else. Who has waited in vain is refused, and for a while after that so is at once who
wants the same: others have been asked, and are again. The loop is the only caller.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.master.catalogs.committing import Committer
from kvstore.master.catalogs.interface import Op
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.lending import Lending
from kvstore.protocol.errors import KVStoreError, QuotaExceeded
from kvstore.protocol.frames import Header
from kvstore.rpc.session import Session
from kvstore.security.quotas.quota import SHARED

PINS, RESERVATIONS = map(SHARED.index, ("pins", "reservations"))
WAIT_NS: Final = 1_000_000_000
"""For others to give: two commits, and a tick of each master, some 0.3 s."""
QUIET_NS: Final = 1_000_000_000
"""After somebody has waited in vain: so long nobody waits for the same."""
MAX_WAITING_KEYS: Final = 1 << 15
"""Of all that wait: they are tried ten times a second, some milliseconds. Who comes beyond is refused at once."""


class _Waiting(NamedTuple):
    session: Session
    request_id: int
    tenant: str
    limit: int
    amount: int
    until_ns: int
    act: Callable[[], None]


class Borrowing:
    """See the module."""

    def __init__(self, directory: Directory, lending: Lending, committer: Committer) -> None:
        self._directory = directory
        self._lending = lending
        self._committer = committer
        self._waiting: list[_Waiting] = []
        self._vain_ns: dict[tuple[str, int], int] = {}
        """Until when nobody waits, by tenant and limit."""

    def attempt(self, session: Session, header: Header, tenant: str, limit: int, count: int, act: Callable[[], None]) -> None:
        """Do `act`, which takes `count` at most of the tenant's limit; where that exceeds this partition's share, again while others may
        give some. Raises what `act` does; what it does later is the answer."""
        try:
            act()
        except QuotaExceeded:
            now_ns = session.reactor.now_ns()
            waiting = _Waiting(session, header.request_id, tenant, limit, count, now_ns + WAIT_NS, act)
            if not self._may_wait(waiting, now_ns):
                raise
            self._waiting.append(waiting)

    def tick(self, now_ns: int) -> None:
        """Give others what they ask for, and look who need not wait any more."""
        self._commit(self._lending.give(self._directory.taken, now_ns))
        self._vain_ns = {which: until_ns for which, until_ns in self._vain_ns.items() if now_ns < until_ns}
        taken, self._waiting = self._waiting, []
        for waiting in taken:
            if waiting.session.is_open:
                self._try(waiting, now_ns)

    def end(self, why: str) -> None:
        """This master owns it no longer: hang up on those who wait, so that they look for the next owner."""
        taken, self._waiting = self._waiting, []
        for waiting in taken:
            waiting.session.close(why)

    def _try(self, waiting: _Waiting, now_ns: int) -> None:
        try:
            waiting.act()
        except QuotaExceeded as error:
            self._ask(waiting, now_ns)
            if now_ns < waiting.until_ns:
                self._waiting.append(waiting)
                return
            self._vain_ns[waiting.tenant, waiting.limit] = now_ns + QUIET_NS
            waiting.session.fail(waiting.request_id, error)
        except KVStoreError as error:
            waiting.session.fail(waiting.request_id, error)

    def _may_wait(self, waiting: _Waiting, now_ns: int) -> bool:
        self._ask(waiting, now_ns)
        is_vain = now_ns < self._vain_ns.get((waiting.tenant, waiting.limit), 0)
        waiting_keys = sum(one.amount for one in self._waiting) + waiting.amount
        return self._lending.may_grow(waiting.tenant, waiting.limit, waiting.amount) and not is_vain and waiting_keys <= MAX_WAITING_KEYS

    def _ask(self, waiting: _Waiting, now_ns: int) -> None:
        used = self._directory.taken(waiting.tenant)[waiting.limit]
        self._commit(self._lending.ask(waiting.tenant, waiting.limit, waiting.amount, used, now_ns))

    def _commit(self, ops: list[Op]) -> None:
        if ops:
            loans = self._lending.now
            self._committer.commit(ops, lambda: self._lending.written(loans))
