"""Limits that hold for the cluster as a whole (quota.SHARED), shared out among the owners of its partitions. Sans-I/O.

A partition begins with an even share of each limit. Who has too little asks the others in a record of its own catalog, which they follow
anyway; who has some left gives away what is missing, or half of what it has left if that is more, in a record of its own too. A share is
the even one, and what others have given, less what was given to others. What was given only ever grows, and counts for the giver at once
and for the taker once it is durable: so all shares together are never more than the limit, however late anybody hears of anything, whoever
dies, and with no word between masters.

Where a limit is lowered, who gave much of it may have given more than it has: its share is nothing, and it owes the rest. The others'
shares are less then by what all owe together, each in proportion and rounded down. Who is given something is given what it owes as well, as
far as the giver keeps what it needs itself. Who has not heard of a gift by then takes the others to have less than they do: until he has,
all shares together may be more than the lowered limit.

Source: V. Balegas et al., Extending eventually consistent cloud databases for enforcing numeric invariants, SRDS 2015 (bounded counters).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.master.directory.records import Asked, LoansRecord
from kvstore.master.directory.shares import Share
from kvstore.security.quotas.quota import SHARED, Quota

MAX_TENANTS: Final = 1024
"""That a partition keeps loans of: a record of at most 1.3 KB each, at every master. Others have their even shares."""
ASK_INTERVAL_NS: Final = 500_000_000
"""Between two records in which a partition asks for the same. Of two that ask at once the one with the higher number gives all the same."""

Loans = Mapping[str, LoansRecord]
"""By tenant; never changed in place."""


class Lending:
    """One partition's part of it. Not thread-safe."""

    def __init__(
        self,
        partition: int,
        count: int,
        recorded: Loans,
        *,
        quota_of: Callable[[str], Quota],
        elsewhere: Callable[[], Sequence[Loans]] = tuple,
    ) -> None:
        """`recorded` is what the catalog of `partition`, one of `count`, has. `elsewhere` gives what is durable of all partitions, in their
        order, as far as it is known here; `quota_of` the limits that the cluster as a whole has."""
        self._partition, self._count = partition, count
        self._quota_of = quota_of
        self._elsewhere = elsewhere
        self.now = recorded
        """What is to be durable."""
        self.durable = recorded
        """What others may count with."""
        self._asked_ns: dict[tuple[str, int], int] = {}
        self._reckoned: dict[tuple[str, int], tuple[int, dict[int, LoansRecord], list[int], int]] = {}
        """What `_parts` found last of each tenant and limit, behind what it came from: many entries to go through for each put."""
        self._looked: dict[int, Loans] = {}
        """What was seen last, by partition."""

    def share_of(self, tenant: str, limit: int) -> Share | None:
        """What this partition's owner may give of the tenant's limit (by its place in SHARED); None: there is no such limit."""
        whole = self._whole(tenant, limit)
        if whole is None or self._count == 1:
            return None if whole is None else Share(whole, whole)
        parts, in_all = self._parts(tenant, limit, whole)
        return Share(max(0, parts[self._partition]) * whole // max(1, in_all), whole)

    def may_grow(self, tenant: str, limit: int, count: int) -> bool:
        """Whether others may have what is missing to so many."""
        whole = self._whole(tenant, limit)
        return whole is not None and count <= whole and self._count > 1

    def ask(self, tenant: str, limit: int, count: int, used: int, now_ns: int) -> list[Op]:
        """The tenant wants `count` more of a limit, of which `used` are in use, and that is more than the share. Operations."""
        asked_ns, share = self._asked_ns.get((tenant, limit)), self.share_of(tenant, limit)
        if share is None or not self.may_grow(tenant, limit, count) or (asked_ns is not None and now_ns < asked_ns + ASK_INTERVAL_NS):
            return []
        ops = self._make_room(tenant)
        if tenant not in self.now and len(self.now) >= MAX_TENANTS:
            return []
        self._asked_ns[tenant, limit] = now_ns
        mine = self._of(tenant)
        asked = [*mine.asked]
        asked[limit] = Asked((asked[limit].number + 1) % (1 << 32), used + count - share.now)
        return [*ops, self._become(replace(mine, asked=(asked[0], asked[1])))]

    def give(self, used: Callable[[str], Sequence[int]], now_ns: int) -> list[Op]:
        """Give others what they have asked for since the last call, as far as there is some left of it. `used` says how much of each limit
        a tenant has in use here. What was asked before the first call is asked again, if it still matters. Operations."""
        self._asked_ns = {which: at_ns for which, at_ns in self._asked_ns.items() if now_ns < at_ns + ASK_INTERVAL_NS}
        ops: dict[str, Op] = {}
        for partition, loans in enumerate(self._elsewhere()):
            former = self._looked.get(partition)
            self._looked[partition] = loans
            if partition == self._partition or former is None or former is loans:
                continue
            for tenant, theirs in loans.items():
                before = former.get(tenant, LoansRecord(tenant)).asked
                for limit, asked in enumerate(theirs.asked):
                    is_new = asked.number != before[limit].number
                    gift = self._gift(tenant, limit, asked.amount, used(tenant)[limit], partition) if is_new else 0
                    if gift:
                        mine, where = self._of(tenant), (limit, partition)
                        given = {**mine.given, where: mine.given.get(where, 0) + gift}
                        ops[tenant] = self._become(replace(mine, given=given))
        return [*ops.values()]

    def written(self, loans: Loans) -> None:
        """What `now` was then is durable."""
        self.durable = loans

    def _gift(self, tenant: str, limit: int, wanted: int, used: int, partition: int) -> int:
        whole = self._whole(tenant, limit)
        is_short = (tenant, limit) in self._asked_ns
        is_kept = tenant in self.now or len(self.now) < MAX_TENANTS
        if whole is None or used >= whole or not is_kept or (is_short and partition > self._partition):
            return 0
        parts, in_all = self._parts(tenant, limit, whole)
        mine, owed = parts[self._partition], max(0, -parts[partition])
        left = (mine * whole - used * in_all) // (whole - used)  # to who owes more: the less is owed, the more parts are worth
        if left >= owed:
            left = mine - -(-used * (in_all - owed) // whole)
        return max(0, min(left, max(owed + -(-wanted * (in_all - owed) // whole), -(-left // 2))))

    def _parts(self, tenant: str, limit: int, whole: int) -> tuple[list[int], int]:
        """What each partition has of the limit, together all of it: less than nothing where it gave more than it has, which others have
        too much. And the sum of what those others have."""
        known = {partition: loans[tenant] for partition, loans in enumerate(self._elsewhere()) if tenant in loans}
        known[self._partition] = self._of(tenant)
        reckoned = self._reckoned.get((tenant, limit))
        if reckoned is None or reckoned[:2] != (whole, known):
            least, extra = divmod(whole, self._count)
            parts = [least + (partition < extra) for partition in range(self._count)]
            for giver, loans in known.items():
                for (of, taker), amount in loans.given.items():
                    if of == limit and taker < self._count:
                        parts[giver] -= amount
                        parts[taker] += amount
            if len(self._reckoned) >= MAX_TENANTS:
                self._reckoned.clear()
            reckoned = self._reckoned[tenant, limit] = whole, known, parts, sum(part for part in parts if part > 0)
        return reckoned[2:]

    def _whole(self, tenant: str, limit: int) -> int | None:
        whole: int | None = getattr(self._quota_of(tenant), SHARED[limit])
        return whole

    def _of(self, tenant: str) -> LoansRecord:
        return self.now.get(tenant) or LoansRecord(tenant)

    def _become(self, loans: LoansRecord) -> Op:
        self.now = {**self.now, loans.tenant: loans}
        return records.put_loans(loans)

    def _make_room(self, tenant: str) -> list[Op]:
        """Forget the loans of tenants without such limits, where there are too many to keep this one's. Operations."""
        if tenant in self.now or len(self.now) < MAX_TENANTS:
            return []
        over = [name for name in self.now if all(self._whole(name, limit) is None for limit in range(len(SHARED)))]
        self.now = {name: loans for name, loans in self.now.items() if name not in over}
        return [records.delete_loans(name) for name in over]
