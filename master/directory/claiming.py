"""Claims of blocks that can be read at their node already: which become the cluster's, which join a version that it has. Sans-I/O.

It decides and reserves; the node's commits are entered by publishing.py like all others.
"""

from array import array

from kvstore.master.directory.keys import NO_ROW
from kvstore.master.directory.reservations import Reservations
from kvstore.master.directory.rows import Rows
from kvstore.master.directory.tenants import Tenant, Tenants
from kvstore.protocol.catalog_messages import Claim
from kvstore.protocol.master_messages import Grants
from kvstore.protocol.message import BUSY, GRANTED, PRESENT


class Claiming:
    """Not thread-safe."""

    def __init__(self, rows: Rows, tenants: Tenants, reservations: Reservations) -> None:
        self._rows, self._tenants, self._reservations = rows, tenants, reservations

    def claim(self, message: Claim, *, node_id: int, now_ns: int) -> Grants:
        """What becomes of the blocks that the node holds. GRANTED: it is reserved for the node, under that generation. PRESENT with a
        generation: the cluster has these bytes as that version, and the node may be entered as a holder; without: it has other bytes.
        BUSY: another writer is at the key, or it is being removed; the second of a repeated key is BUSY, too.

        Raises Full (too many stand reserved already), InvalidArgument (a tenant's name); nothing was reserved.
        """
        owner = self._tenants.asked(message.tenant)
        statuses = bytearray(len(message.keys))
        generations = array("Q", bytes(8 * len(message.keys)))
        wanted: dict[bytes, int] = {}
        for at, (key, size, checksum) in enumerate(zip(message.keys, message.sizes, message.checksums, strict=True)):
            row = owner.rows.get(key, NO_ROW)
            if self._rows.sets.live[self._rows.holders[row]]:
                if key in owner.removing or self._rows.generations[row] <= owner.removed.get(key, 0):
                    statuses[at] = BUSY
                    continue
                statuses[at] = PRESENT
                if (size, checksum) == (self._rows.sizes[row], self._rows.checksums[row]):
                    generations[at] = self._rows.generations[row]
            elif key in wanted or self._is_busy(owner, key, now_ns):
                statuses[at] = BUSY
            else:
                statuses[at] = GRANTED
                wanted[key] = at
        if wanted:
            sizes = [message.sizes[at] for at in wanted.values()]
            owner = self._tenants.of(message.tenant)
            granted = self._reservations.grant(owner, list(wanted), sizes, [node_id] * len(wanted), now_ns)
            for at, generation in zip(wanted.values(), granted, strict=True):
                generations[at] = generation
        nodes = array("I", [node_id if generation else 0 for generation in generations])
        return Grants(bytes(statuses), nodes, generations)

    def _is_busy(self, owner: Tenant, key: bytes, now_ns: int) -> bool:
        return key in owner.pending or self._reservations.held(owner, key, self._rows.sets.live_nodes, now_ns)
