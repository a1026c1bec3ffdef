"""Puts that end without a visible block, and when their slots can be used again: not before nobody can write into them any more.

It owns neither puts nor tiers. The block table is its only caller, and passes on what it is asked here.
"""

from typing import Final

from kvstore.store.blocks.open_puts import OpenPut, OpenPuts
from kvstore.tiers.tier import Tier

MAX_ENDED: Final = 2048
"""Puts of writers who are gone that end at once: some 10 ms of the loop. The others do in the next turns."""


class EndedPuts:
    """Ends `puts`, whose slots are in `tier` (DRAM)."""

    def __init__(self, puts: OpenPuts, tier: Tier) -> None:
        self._puts = puts
        self._tier = tier
        self._revoking: list[OpenPut] = []
        """Puts that are over, whose slots are still being written from another host."""
        self._gone: dict[object, None] = {}
        """Writers who are gone and may have puts yet."""

    def abort(self, put: OpenPut) -> None:
        """Its writer is done with the put, which is open or has expired: free its slot at once, for nobody else knew of it; or, when it
        is being written from another host right now, as soon as that has ended. One that ended otherwise is left alone."""
        if self._puts.holds(put):
            self._puts.close(put)
            self._tier.quarantine(put.slot)
            self._release(put)
        else:
            self.settle(put.put_id, put.owner)

    def expire(self, *, now_ns: int) -> int:
        """Close the puts whose time is over; returns how many. Their slots wait for the writer (`settle`) or its end
        (`forget_owner`): a stopped process that goes on may still write through its mapping, and must not write into another block.
        Those written from another host are free as soon as nothing is written any more."""
        revoking, self._revoking = self._revoking, []
        for put in revoking:
            self._release(put)
        expired = self._puts.expire(now_ns=now_ns)
        for put in expired:
            self._tier.quarantine(put.slot)
            if put.grant is not None:
                self._puts.reclaim(put.put_id, put.owner)
                self._release(put)
        return len(expired)

    def settle(self, put_id: int, owner: object) -> None:
        """The writer says that it is done with a put that is not open: an expired one's slot can be used again."""
        put = self._puts.reclaim(put_id, owner)
        if put is not None:
            self._release(put)

    def awaited(self) -> list[object]:
        """The writers that the slots of expired puts wait for."""
        return [owner for owner in self._puts.stranded() if owner not in self._gone]

    def forget_owner(self, owner: object) -> None:
        """The writer is gone: its open puts are aborted, and the slots of its expired ones can be used again; of very many, some at once,
        and the others by `go_on`, as if its end had been noticed later."""
        self._gone[owner] = None
        self.go_on()

    def go_on(self) -> None:
        """To be called in each turn of the loop."""
        left = MAX_ENDED
        while left and self._gone:
            owner = next(iter(self._gone))
            opened = self._puts.of_owner(owner, left)
            for put in opened:
                self.abort(put)
            left -= len(opened)
            expired = self._puts.reclaim_all(owner, left)
            for put in expired:
                self._release(put)
            left -= len(expired)
            if left:
                del self._gone[owner]

    def _release(self, put: OpenPut) -> None:
        """Free a quarantined slot once nobody can write it any more."""
        if put.grant is None or put.grant.revoke():
            self._tier.release(put.slot)
        else:
            self._revoking.append(put)

    def check_integrity(self) -> None:
        """Assert that only what is written from another host is waited for. For tests."""
        assert all(put.grant is not None for put in self._revoking)
