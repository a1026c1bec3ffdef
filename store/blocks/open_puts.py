"""The puts at work: who writes which key, until when, and the slots of those whose time ran out. Pure; `now_ns` is passed in."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.store.blocks.block import Block
from kvstore.tiers.tier import Slot


class Grant(Protocol):
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
    grant: Grant | None = None
    is_named: bool = False

    @property
    def slot(self) -> Slot:
        """Where the value goes."""
        slot = self.block.dram
        assert slot is not None
        return slot


class OpenPuts:
    """At most one a key. It owns no slot: the block table frees what `close` and the `reclaim`s give back."""

    def __init__(self, *, ttl_ns: int) -> None:
        self._ttl_ns = ttl_ns
        self._puts: dict[int, OpenPut] = {}
        self._writers: dict[str, dict[bytes, OpenPut]] = {}
        """By tenant and key. None of them empty."""
        self._expiry: deque[OpenPut] = deque()
        self._stranded: dict[object, dict[int, OpenPut]] = {}
        self._next_id = 1

    def of_key(self, tenant: str, key: bytes) -> OpenPut | None:
        of_tenant = self._writers.get(tenant)
        return of_tenant.get(key) if of_tenant is not None else None

    def has_any(self, tenant: str, keys: Iterable[bytes]) -> bool:
        """Whether one of the keys has a put."""
        of_tenant = self._writers.get(tenant)
        return of_tenant is not None and not of_tenant.keys().isdisjoint(keys)

    def get(self, put_id: int, owner: object) -> OpenPut | None:
        """The open put of that id, if `owner` is its writer and was told it."""
        put = self._puts.get(put_id)
        return put if put is not None and put.owner is owner and put.is_named else None

    def get_all(self, put_ids: Sequence[int], owner: object) -> list[OpenPut] | None:
        """As `get`, of several; None unless all of them are open, and each is named once."""
        if len(set(put_ids)) < len(put_ids):
            return None
        found: list[OpenPut] = []
        for put_id in put_ids:
            put = self._puts.get(put_id)
            if put is None or put.owner is not owner or not put.is_named:
                return None
            found.append(put)
        return found

    def holds(self, put: OpenPut) -> bool:
        """Whether it is still open."""
        return self._puts.get(put.put_id) is put

    def of_owner(self, owner: object) -> list[OpenPut]:
        return [put for put in self._puts.values() if put.owner is owner]

    def add(self, block: Block, owner: object, *, now_ns: int) -> OpenPut:
        """Begin a put of a block that has its slot; nobody else may be writing its key."""
        put = OpenPut(self._next_id, block, owner, now_ns + self._ttl_ns)
        self._next_id += 1
        self._puts[put.put_id] = self._writers.setdefault(block.tenant, {})[block.key] = put
        self._expiry.append(put)
        return put

    def add_all(self, blocks: Sequence[Block], owner: object, *, now_ns: int) -> list[OpenPut]:
        """As `add`, of blocks of one tenant that have different keys; there is at least one."""
        expires_ns, first = now_ns + self._ttl_ns, self._next_id
        self._next_id += len(blocks)
        puts = [OpenPut(put_id, block, owner, expires_ns) for put_id, block in enumerate(blocks, first)]
        self._puts.update(enumerate(puts, first))
        self._writers.setdefault(blocks[0].tenant, {}).update(zip([block.key for block in blocks], puts, strict=True))
        self._expiry.extend(puts)
        return puts

    def close(self, put: OpenPut) -> None:
        """The put is over, however it ended."""
        del self._puts[put.put_id]
        of_tenant = self._writers[put.block.tenant]
        del of_tenant[put.block.key]
        if not of_tenant:
            del self._writers[put.block.tenant]

    def close_all(self, puts: Sequence[OpenPut]) -> None:
        """As `close`, of different puts of one tenant; there is at least one."""
        tenant = puts[0].block.tenant
        by_id, of_tenant = self._puts, self._writers[tenant]
        for put in puts:
            del by_id[put.put_id], of_tenant[put.block.key]
        if not of_tenant:
            del self._writers[tenant]

    def expire(self, *, now_ns: int) -> list[OpenPut]:
        """Close the puts whose time is over and return them. Their slots are stranded until their writers are done with them."""
        expired = []
        while self._expiry and (self._expiry[0].expires_ns <= now_ns or self._expiry[0].put_id not in self._puts):
            put = self._expiry.popleft()
            if put.put_id in self._puts:
                self.close(put)
                self._stranded.setdefault(put.owner, {})[put.put_id] = put
                expired.append(put)
        return expired

    def reclaim(self, put_id: int, owner: object) -> OpenPut | None:
        """The writer of an expired put has said that it is done: the put, whose slot is free now, if this is one."""
        of_owner = self._stranded.get(owner)
        put = of_owner.pop(put_id, None) if of_owner is not None else None
        if of_owner is not None and not of_owner:
            del self._stranded[owner]
        return put

    def reclaim_all(self, owner: object) -> list[OpenPut]:
        """The writer is gone: its expired puts, whose slots are free now."""
        return list(self._stranded.pop(owner, {}).values())

    def count_of(self, tenant: str) -> int:
        """Open puts of a tenant."""
        return len(self._writers.get(tenant, ()))

    def tenants(self) -> set[str]:
        """Those that have some."""
        return set(self._writers)

    def __len__(self) -> int:
        return len(self._puts)

    def check_integrity(self) -> None:
        """Assert that both indexes agree, and that every open put will expire. For tests; O(puts)."""
        assert all(self._writers.values())
        writers = {put for of_tenant in self._writers.values() for put in of_tenant.values()}
        assert writers == set(self._puts.values()) <= set(self._expiry)
