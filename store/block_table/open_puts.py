"""Open puts: which writer has which key, until when, and when the slot of an ended one can be used again. `now_ns` is passed in.

A put ends by its commit, its abort, its time, or the end of its writer. Its slot is free once no writer can write into it any more.
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
"""Batches of a tenant that are kept as such: a key is looked for in one after the other."""

MAX_EXPIRED: Final = 2048
"""Puts that expire at once: some 10 ms of the loop. The others do the next time."""

MAX_ENDED: Final = 2048
"""Puts of writers who are gone that end at once: some 10 ms of the loop. The others do in the next turns."""


class WritePermission(Protocol):
    """Leave to write a slot from another host, by the transfer engine."""

    def revoke(self) -> bool:
        """Nothing new may be written. True once nothing is being written any more either; may be called again."""


@dataclass(slots=True, eq=False)
class OpenPut:
    """An open put: the block it will make visible, and until when. Its bytes are undefined until the writer says `commit`.

    `is_named`: its writer was told the number, writes the slot itself and ends the put by that number. All others are ended by who opened
    them (for a value that comes through a socket, a claim that the master has not decided, a replica), and by no number: it can be guessed.
    """

    put_id: int
    block: Block
    owner: object
    expires_ns: int
    grant: WritePermission | None = None
    is_named: bool = False

    @property
    def slot(self) -> Slot:
        """Where the value goes."""
        slot = self.block.dram
        assert slot is not None
        return slot


@dataclass(slots=True, eq=False)
class OpenBatch:
    """Puts of one message to one tenant, with numbers in a row, that have their slots and end together as a rule: until somebody asks for
    one of them there is no OpenPut, only this. `keys` are those of `blocks`, as a set; `is_named` as of an OpenPut.
    """

    first_id: int
    blocks: list[Block]
    keys: Set[bytes]
    owner: object
    expires_ns: int
    is_named: bool = False
    puts: list[OpenPut] = field(default_factory=list)
    """Once they were asked for."""

    @property
    def ids(self) -> range:
        """The puts' numbers, in the order of the blocks."""
        return range(self.first_id, self.first_id + len(self.blocks))


class OpenPuts:
    """At most one a key. It owns no slot: the block table frees what `close` and the `reclaim`s give back."""

    def __init__(self, *, ttl_ns: int) -> None:
        self._ttl_ns = ttl_ns
        self._puts: dict[int, OpenPut] = {}
        self._writers: dict[str, dict[bytes, OpenPut]] = {}
        """By tenant and key. None of them empty."""
        self._of_owner: dict[object, dict[int, OpenPut | OpenBatch]] = {}
        """By owner, puts by their numbers and batches by their first. None of them empty."""
        self._batches: dict[int, OpenBatch] = {}
        """Those of which no put was asked for by itself, by their first number, ascending: their puts are in neither of these."""
        self._first_ids: list[int] = []
        """Theirs."""
        self._of_tenant: dict[str, dict[int, OpenBatch]] = {}
        """The same by tenant, MAX_WHOLE at most of each. None of them empty."""
        self._whole_blocks = 0
        """Blocks in them."""
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
        """Whether one of the keys has a put."""
        of_tenant = self._writers.get(tenant)
        if of_tenant is not None and not of_tenant.keys().isdisjoint(keys):
            return True
        batches = self._of_tenant.get(tenant)
        return batches is not None and any(not batch.keys.isdisjoint(keys) for batch in batches.values())

    def get(self, put_id: int, owner: object) -> OpenPut | None:
        """The open put of that id, if `owner` is its writer and was told it."""
        put = self._puts.get(put_id)
        if put is None and self._batches:
            before = bisect_right(self._first_ids, put_id)
            batch = self._batches[self._first_ids[before - 1]] if before else None
            if batch is not None and put_id in batch.ids:
                self._split(batch)
                put = self._puts.get(put_id)
        return put if put is not None and put.owner is owner and put.is_named else None

    def get_batch(self, put_ids: Sequence[int], owner: object) -> OpenBatch | None:
        """The batch that these are the numbers of, all of them in order, if `owner` is its writer and was told them, and nobody has asked
        for one of its puts."""
        batch = self._batches.get(put_ids[0]) if put_ids else None
        is_meant = batch is not None and batch.owner is owner and batch.is_named
        return batch if is_meant and batch is not None and array("Q", put_ids) == array("Q", batch.ids) else None

    def holds(self, put: OpenPut) -> bool:
        """Whether it is still open."""
        return self._puts.get(put.put_id) is put

    def of_owner(self, owner: object, most: int | None = None) -> list[OpenPut]:
        """Its open puts, so many at most."""
        found: list[OpenPut] = []
        for one in list(islice(self._of_owner.get(owner, {}).values(), most)):
            found += self._split(one) if isinstance(one, OpenBatch) else [one]
            if most is not None and len(found) >= most:
                break
        return found[:most]

    def has_any_of(self, owner: object) -> bool:
        """Whether the owner has open puts, or expired ones whose slots wait for it."""
        return owner in self._of_owner or owner in self._stranded

    def add(self, block: Block, owner: object, *, now_ns: int) -> OpenPut:
        """Begin a put of a block that has its slot; nobody else may be writing its key."""
        put = OpenPut(self._next_id, block, owner, now_ns + self._ttl_ns)
        self._next_id += 1
        self._puts[put.put_id] = self._writers.setdefault(block.tenant, {})[block.key] = put
        self._of_owner.setdefault(owner, {})[put.put_id] = put
        self._expiry.append(put)
        return put

    def add_batch(self, blocks: list[Block], owner: object, *, now_ns: int) -> OpenBatch:
        """As `add`, of blocks of one tenant that have different keys; there is at least one."""
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
        """As `add_batch`: the puts."""
        return self._split(self.add_batch(list(blocks), owner, now_ns=now_ns))

    def puts_of(self, batch: OpenBatch) -> list[OpenPut]:
        """All puts that the batch began with."""
        return self._split(batch) if batch.first_id in self._batches else batch.puts

    def _split(self, batch: OpenBatch) -> list[OpenPut]:
        """Each put of a batch is by itself from now on."""
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
        """The put is over, however it ended."""
        del self._puts[put.put_id]
        self._take_from(put.owner, put.put_id)
        of_tenant = self._writers[put.block.tenant]
        del of_tenant[put.block.key]
        if not of_tenant:
            del self._writers[put.block.tenant]

    def close_batch(self, batch: OpenBatch) -> None:
        """As `close`, of all puts of a batch that `get_batch` gave."""
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
        """As `close`, of different puts of one tenant; there is at least one."""
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
        """Close puts whose time is over, MAX_EXPIRED at most, and return them. Their slots are stranded until their writers are done with
        them."""
        expired = list[OpenPut]()
        while len(expired) < MAX_EXPIRED and self._expiry and (self._expiry[0].expires_ns <= now_ns or not self._is_open(self._expiry[0])):
            first = self._expiry.popleft()
            if isinstance(first, OpenBatch):
                self._expiry.extendleft(reversed(self.puts_of(first)))  # which may be more than expire at once
            elif first.put_id in self._puts:
                self.close(first)
                self._stranded.setdefault(first.owner, {})[first.put_id] = first
                expired.append(first)
        return expired

    def _is_open(self, one: OpenPut | OpenBatch) -> bool:
        """Whether the put, or one of the batch's, is still open."""
        if isinstance(one, OpenPut):
            return one.put_id in self._puts
        return one.first_id in self._batches or any(put.put_id in self._puts for put in one.puts)

    def reclaim(self, put_id: int, owner: object) -> OpenPut | None:
        """The writer of an expired put has said that it is done: the put, whose slot is free now, if this is one."""
        of_owner = self._stranded.get(owner)
        put = of_owner.pop(put_id, None) if of_owner is not None else None
        if of_owner is not None and not of_owner:
            del self._stranded[owner]
        return put

    def reclaim_all(self, owner: object, most: int | None = None) -> list[OpenPut]:
        """The writer is gone: its expired puts, so many at most, whose slots are free now."""
        of_owner = self._stranded.get(owner, {})
        found = list(islice(of_owner.values(), most))
        for put in found:
            del of_owner[put.put_id]
        if not of_owner:
            self._stranded.pop(owner, None)
        return found

    def stranded(self) -> list[object]:
        """The writers that expired puts wait for."""
        return list(self._stranded)

    def count_of(self, tenant: str) -> int:
        """Open puts of a tenant."""
        whole = self._of_tenant.get(tenant)
        return len(self._writers.get(tenant, ())) + (sum([len(batch.blocks) for batch in whole.values()]) if whole else 0)

    def tenants(self) -> set[str]:
        """Those that have some."""
        return set(self._writers) | set(self._of_tenant)

    def __len__(self) -> int:
        return len(self._puts) + self._whole_blocks


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
