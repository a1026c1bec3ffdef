"""Claims of blocks whose bytes are at their node already: which become the cluster's, which join a version that it has. Sans-I/O.

It decides; what is granted is entered in the same turn of the loop, by publishing.py like all other commits, and so is not reserved.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from kvstore.master.directory.holders import HINTED, NAMED, NOBODY
from kvstore.master.directory.keys import NO_ROW
from kvstore.master.directory.reservations import Reservations
from kvstore.master.directory.rows import Rows
from kvstore.master.directory.tenants import Tenant, Tenants
from kvstore.protocol.catalog_messages import Claim
from kvstore.protocol.master_messages import Grants
from kvstore.protocol.message import BUSY, GRANTED, PRESENT

MIN_NEW: Final = 4
"""Keys that are looked at together first: one takes half as long by itself."""


class Claiming:
    """Not thread-safe."""

    def __init__(self, rows: Rows, tenants: Tenants, reservations: Reservations) -> None:
        self._rows, self._tenants, self._reservations = rows, tenants, reservations

    def claim(self, message: Claim, *, node_id: int, now_ns: int) -> Grants:
        """What becomes of the blocks that the node has. GRANTED: it is the node's to publish, under that generation. PRESENT with a
        generation, of blocks that can be read at the node (`held`): the cluster has these bytes as that version, and the node may be
        entered as a holder; without: it has other bytes, or the node gives up its own. BUSY: another writer is at the key, or what the
        node holds is being removed; or the cluster's block would be told as PRESENT without a generation, and no inventory has named it
        yet, so that it may be lost. It is lost where only this node was thought to have it, which would not claim the key then: that is
        GRANTED. The second of a repeated key is BUSY, too.

        Raises Full (too many stand reserved already), InvalidArgument (a tenant's name); nothing has changed.
        """
        owner = self._tenants.asked(message.tenant)
        if len(message.keys) >= MIN_NEW and self._are_new(owner, message.keys):
            granted = self._reservations.pass_over(self._tenants.of(message.tenant), message.keys)
            count = len(message.keys)
            return Grants(bytes((GRANTED,)) * count, array("I", (node_id,)) * count, array("Q", granted))
        statuses = bytearray(len(message.keys))
        generations = array("Q", bytes(8 * len(message.keys)))
        wanted: dict[bytes, int] = {}
        for at, (key, size, checksum) in enumerate(zip(message.keys, message.sizes, message.checksums, strict=True)):
            row = owner.rows.get(key, NO_ROW)
            standing = self._rows.sets.standing[self._rows.holders[row]]
            is_same = message.held and (size, checksum) == (self._rows.sizes[row], self._rows.checksums[row])
            if standing == HINTED and not is_same and self._has_lost(owner, key, row, node_id):
                standing = NOBODY
            if standing:
                statuses[at] = PRESENT if standing == NAMED else BUSY
                if not message.held:
                    continue
                if key in owner.removing or self._rows.generations[row] <= owner.removed.get(key, 0):
                    statuses[at] = BUSY
                elif is_same:
                    statuses[at], generations[at] = PRESENT, self._rows.generations[row]
            elif key in wanted or self._is_busy(owner, key, now_ns):
                statuses[at] = BUSY
            else:
                statuses[at] = GRANTED
                wanted[key] = at
        if wanted:
            granted = self._reservations.pass_over(self._tenants.of(message.tenant), list(wanted))
            for at, generation in zip(wanted.values(), granted, strict=True):
                generations[at] = generation
        nodes = array("I", [node_id if generation else 0 for generation in generations])
        return Grants(bytes(statuses), nodes, generations)

    def _are_new(self, owner: Tenant, keys: Sequence[bytes]) -> bool:
        """Each is named once, and nothing is known of it."""
        is_unknown = not owner.pending.has_any(keys) and owner.reserved.keys().isdisjoint(keys)
        return is_unknown and len(set(keys)) == len(keys) and not owner.rows.has_any(keys)

    def _has_lost(self, owner: Tenant, key: bytes, row: int, node_id: int) -> bool:
        """Whether nobody has a block that is only hinted at, as one of the key's is claimed by the node: one that was granted to it just
        before its link broke, so that it never heard of that."""
        return key not in owner.removing and all(holder == node_id for holder, _state in self._rows.pairs(row))

    def _is_busy(self, owner: Tenant, key: bytes, now_ns: int) -> bool:
        return key in owner.pending or self._reservations.held(owner, key, self._rows.sets.live_nodes, now_ns)
