"""Open puts: slots that writers fill, by key and by owner, with their expiry. `now_ns` is passed in.

A put ends by commit, abort, expiry, or the end of its writer. Its slot is freed once no writer can write it any more.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.rows import keys_of
from kvstore.tiers.tier import Slot, Tier

MAX_WHOLE: Final = 64
"""Batches of a tenant that stay unsplit. A key lookup scans them."""

MAX_EXPIRED: Final = 2048
"""Puts expired per call: about 10 ms of the loop."""

MAX_ENDED: Final = 2048
"""Puts of disconnected writers ended per call: about 10 ms of the loop."""


class WritePermission(Protocol):
    """Permission to write a slot from another host, through the transfer engine."""

    def revoke(self) -> bool:
        """Refuse new writes. Return True once none is in progress. May be called again."""


@dataclass(slots=True, eq=False)
class OpenPut:
    """Open put of one block. Its slot's bytes are undefined until the commit.

    `is_named`: the writer knows the id, writes the slot itself and ends the put by id. Other puts are ended by the code
    that opened them (payload over a socket, unanswered commit request, replica), never by id, because ids can be
    guessed.
    """

    put_id: int
    block: Block
    owner: object
    expires_ns: int
    grant: WritePermission | None = None
    is_named: bool = False

    @property
    def slot(self) -> Slot:
        """Slot of the value."""
        slot = self.block.dram
        assert slot is not None
        return slot


@dataclass(slots=True, eq=False)
class OpenBatch:
    """Puts of one message for one tenant, with consecutive ids, that usually end together. No OpenPut exists until one
    is requested. `keys` is the set of the blocks' keys."""

    first_id: int
    blocks: list[Block]
    keys: Set[bytes]
    owner: object
    expires_ns: int
    is_named: bool = False
    puts: list[OpenPut] = field(default_factory=list)
    """Set once one of them was requested."""

    @property
    def ids(self) -> range:
        """Ids of the puts, in the order of the blocks."""
        return range(self.first_id, self.first_id + len(self.blocks))


class OpenPuts:
    """Index of open puts, at most one per key. It owns no slots: the block table frees those of ended puts."""

    def __init__(self, *, ttl_ns: int) -> None:
        self._ttl_ns = ttl_ns
        self._puts: dict[int, OpenPut] = {}
        self._writers: dict[str, dict[bytes, OpenPut]] = {}
        """By tenant and key. No empty dicts."""
        self._of_owner: dict[object, dict[int, OpenPut | OpenBatch]] = {}
        """By owner: puts by id, batches by first id. No empty dicts."""
        self._batches: dict[int, OpenBatch] = {}
        """Unsplit batches by first id, ascending. Their puts are in neither of the dicts above."""
        self._first_ids: list[int] = []
        """Keys of `_batches`."""
        self._of_tenant: dict[str, dict[int, OpenBatch]] = {}
        """`_batches` by tenant, at most MAX_WHOLE each. No empty dicts."""
        self._whole_blocks = 0
        """Number of blocks in `_batches`."""
        self._expiry: deque[OpenPut | OpenBatch] = deque()
        self._stranded: dict[object, dict[int, OpenPut]] = {}
        self._next_id = 1

    def of_key(self, tenant: str, key: bytes) -> OpenPut | None:
        if tenant in self._of_tenant:
            for batch in [batch for batch in self._of_tenant[tenant].values() if key in batch.keys]:
                self._split(batch)
        of_tenant = self._writers.get(tenant)
        return of_tenant.get(key) if of_tenant is not None else None

    def has_any(self, tenant: str, keys: Iterable[bytes]) -> bool:
        """Return True if one of the keys has an open put."""
        of_tenant = self._writers.get(tenant)
        if of_tenant is not None and not of_tenant.keys().isdisjoint(keys):
            return True
        batches = self._of_tenant.get(tenant)
        return batches is not None and any(not batch.keys.isdisjoint(keys) for batch in batches.values())

    def get(self, put_id: int, owner: object) -> OpenPut | None:
        """Return the open put of that id if `owner` is its writer and knows the id."""
        put = self._puts.get(put_id)
        if put is None and self._batches:
            before = bisect_right(self._first_ids, put_id)
            batch = self._batches[self._first_ids[before - 1]] if before else None
            if batch is not None and put_id in batch.ids:
                self._split(batch)
                put = self._puts.get(put_id)
        return put if put is not None and put.owner is owner and put.is_named else None

    def get_batch(self, put_ids: Sequence[int], owner: object) -> OpenBatch | None:
        """Return the unsplit batch with exactly these ids, in order, if `owner` is its writer and knows them."""
        batch = self._batches.get(put_ids[0]) if put_ids else None
        is_meant = batch is not None and batch.owner is owner and batch.is_named
        return batch if is_meant and batch is not None and array("Q", put_ids) == array("Q", batch.ids) else None

    def holds(self, put: OpenPut) -> bool:
        """Return True if the put is open."""
        return self._puts.get(put.put_id) is put

    def of_owner(self, owner: object, most: int | None = None) -> list[OpenPut]:
        """Return the owner's open puts, `most` at most."""
        found: list[OpenPut] = []
        for one in list(islice(self._of_owner.get(owner, {}).values(), most)):
            found += self._split(one) if isinstance(one, OpenBatch) else [one]
            if most is not None and len(found) >= most:
                break
        return found[:most]

    def has_any_of(self, owner: object) -> bool:
        """Return True if the owner has open puts, or expired ones whose slots are not freed."""
        return owner in self._of_owner or owner in self._stranded

    def add(self, block: Block, owner: object, *, now_ns: int) -> OpenPut:
        """Open a put of a block that has its slot. The key must have no other put."""
        put = OpenPut(self._next_id, block, owner, now_ns + self._ttl_ns)
        self._next_id += 1
        self._puts[put.put_id] = self._writers.setdefault(block.tenant, {})[block.key] = put
        self._of_owner.setdefault(owner, {})[put.put_id] = put
        self._expiry.append(put)
        return put

    def add_batch(self, blocks: list[Block], owner: object, *, now_ns: int) -> OpenBatch:
        """Open puts of one tenant's blocks with distinct keys; at least one."""
        batch = OpenBatch(self._next_id, blocks, frozenset(keys_of(blocks)), owner, now_ns + self._ttl_ns)
        self._next_id += len(blocks)
        of_tenant = self._of_tenant.setdefault(blocks[0].tenant, {})
        if len(of_tenant) >= MAX_WHOLE:
            self._split(next(iter(of_tenant.values())))
            of_tenant = self._of_tenant.setdefault(blocks[0].tenant, {})
        of_tenant[batch.first_id] = self._batches[batch.first_id] = batch
        self._of_owner.setdefault(owner, {})[batch.first_id] = batch
        self._first_ids.append(batch.first_id)
        self._whole_blocks += len(blocks)
        self._expiry.append(batch)
        return batch

    def add_all(self, blocks: Sequence[Block], owner: object, *, now_ns: int) -> list[OpenPut]:
        """As `add_batch`, but return the puts."""
        return self._split(self.add_batch(list(blocks), owner, now_ns=now_ns))

    def puts_of(self, batch: OpenBatch) -> list[OpenPut]:
        """Return all puts that the batch began with."""
        return self._split(batch) if batch.first_id in self._batches else batch.puts

    def _split(self, batch: OpenBatch) -> list[OpenPut]:
        """Replace a batch by its puts."""
        self.close_batch(batch)
        owner, expires_ns, is_named = batch.owner, batch.expires_ns, batch.is_named
        columns = zip(batch.ids, batch.blocks, strict=True)
        batch.puts = [OpenPut(put_id, block, owner, expires_ns, is_named=is_named) for put_id, block in columns]
        self._puts.update(zip(batch.ids, batch.puts, strict=True))
        self._of_owner.setdefault(owner, {}).update(zip(batch.ids, batch.puts, strict=True))
        of_tenant = self._writers.setdefault(batch.blocks[0].tenant, {})
        of_tenant.update(zip([block.key for block in batch.blocks], batch.puts, strict=True))
        return batch.puts

    def close(self, put: OpenPut) -> None:
        """Remove a put that has ended."""
        del self._puts[put.put_id]
        self._take_from(put.owner, put.put_id)
        of_tenant = self._writers[put.block.tenant]
        del of_tenant[put.block.key]
        if not of_tenant:
            del self._writers[put.block.tenant]

    def close_batch(self, batch: OpenBatch) -> None:
        """Remove all puts of an unsplit batch."""
        del self._batches[batch.first_id]
        del self._first_ids[bisect_left(self._first_ids, batch.first_id)]
        self._take_from(batch.owner, batch.first_id)
        tenant = batch.blocks[0].tenant
        of_tenant = self._of_tenant[tenant]
        del of_tenant[batch.first_id]
        if not of_tenant:
            del self._of_tenant[tenant]
        self._whole_blocks -= len(batch.blocks)

    def close_all(self, puts: Sequence[OpenPut]) -> None:
        """Remove puts of one tenant; at least one."""
        tenant = puts[0].block.tenant
        by_id, of_tenant = self._puts, self._writers[tenant]
        for put in puts:
            del by_id[put.put_id], of_tenant[put.block.key]
            self._take_from(put.owner, put.put_id)
        if not of_tenant:
            del self._writers[tenant]

    def _take_from(self, owner: object, number: int) -> None:
        of_owner = self._of_owner[owner]
        del of_owner[number]
        if not of_owner:
            del self._of_owner[owner]

    def expire(self, *, now_ns: int) -> list[OpenPut]:
        """Close and return expired puts, at most MAX_EXPIRED. Their slots are stranded until their writers are done."""
        expired = list[OpenPut]()
        while len(expired) < MAX_EXPIRED and self._expiry and (self._expiry[0].expires_ns <= now_ns or not self._is_open(self._expiry[0])):
            first = self._expiry.popleft()
            if isinstance(first, OpenBatch):
                self._expiry.extendleft(reversed(self.puts_of(first)))  # may exceed MAX_EXPIRED
            elif first.put_id in self._puts:
                self.close(first)
                self._stranded.setdefault(first.owner, {})[first.put_id] = first
                expired.append(first)
        return expired

    def _is_open(self, one: OpenPut | OpenBatch) -> bool:
        if isinstance(one, OpenPut):
            return one.put_id in self._puts
        return one.first_id in self._batches or any(put.put_id in self._puts for put in one.puts)

    def reclaim(self, put_id: int, owner: object) -> OpenPut | None:
        """Return the owner's expired put of that id, whose slot its writer has released; None if it has none."""
        of_owner = self._stranded.get(owner)
        put = of_owner.pop(put_id, None) if of_owner is not None else None
        if of_owner is not None and not of_owner:
            del self._stranded[owner]
        return put

    def reclaim_all(self, owner: object, most: int | None = None) -> list[OpenPut]:
        """Return expired puts of a disconnected owner, `most` at most. Their slots can be freed."""
        of_owner = self._stranded.get(owner, {})
        found = list(islice(of_owner.values(), most))
        for put in found:
            del of_owner[put.put_id]
        if not of_owner:
            self._stranded.pop(owner, None)
        return found

    def stranded(self) -> list[object]:
        """Owners whose expired puts still have slots."""
        return list(self._stranded)

    def count_of(self, tenant: str) -> int:
        """Number of a tenant's open puts."""
        whole = self._of_tenant.get(tenant)
        return len(self._writers.get(tenant, ())) + (sum([len(batch.blocks) for batch in whole.values()]) if whole else 0)

    def tenants(self) -> set[str]:
        """Tenants with open puts."""
        return set(self._writers) | set(self._of_tenant)

    def __len__(self) -> int:
        return len(self._puts) + self._whole_blocks


class EndedPuts:
    """Ends puts and frees their DRAM slots once no writer can write them."""

    def __init__(self, puts: OpenPuts, tier: Tier) -> None:
        self._puts = puts
        self._tier = tier
        self._revoking: list[OpenPut] = []
        """Ended puts whose slots are still being written from another host."""
        self._gone: dict[object, None] = {}
        """Disconnected owners that may still have puts."""

    def abort(self, put: OpenPut) -> None:
        """End a put that is open or expired, and free its slot: at once, or once a transfer into it has ended. A put
        that ended otherwise is left alone."""
        if self._puts.holds(put):
            self._puts.close(put)
            self._tier.quarantine(put.slot)
            self._release(put)
        else:
            self.settle(put.put_id, put.owner)

    def expire(self, *, now_ns: int) -> int:
        """Close expired puts and return their number.

        A slot that a local writer has mapped waits for `settle` or `forget_owner`: a stopped process may resume and
        write through its mapping. A slot written from another host is freed once no transfer is in progress.
        """
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
        """Free the slot of an expired put whose writer reports that it is done."""
        put = self._puts.reclaim(put_id, owner)
        if put is not None:
            self._release(put)

    def awaited(self) -> list[object]:
        """Owners whose expired puts keep their slots."""
        return [owner for owner in self._puts.stranded() if owner not in self._gone]

    def forget_owner(self, owner: object) -> None:
        """Abort the puts of a disconnected owner and free its expired ones; at most MAX_ENDED now, the others by
        `run_due`."""
        self._gone[owner] = None
        self.run_due()

    def run_due(self) -> None:
        """End puts of disconnected owners, at most MAX_ENDED. Called once per loop iteration."""
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
        """Free a quarantined slot, or keep it in `_revoking` while it is written."""
        if put.grant is None or put.grant.revoke():
            self._tier.release(put.slot)
        else:
            self._revoking.append(put)
