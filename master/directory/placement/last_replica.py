"""Selects which replicas may be evicted, so that the last one of a block is evicted last. Sans-I/O.

A block is kept by as many holders as its replica target, one without a target, more while it is hot (hot_copies.py).
The block's generation selects them, so that all nodes get the same result, and two nodes that ask at once do not
both evict it. Hot copies are evicted first. A block is kept at its home, not by the secondary copy
(home_copies.py). The choice is stateless, and not enforced."""

from collections.abc import Mapping, Sequence

from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.placement.home_copies import HomeCopy
from kvstore.master.directory.placement.hot_copies import HotBlock
from kvstore.protocol.node_states import ALIVE


class LastReplicas:
    """Answers which blocks a node may evict because others keep them. Not thread-safe."""

    def __init__(
        self, parts: DirectoryParts, secondary: Mapping[tuple[str, bytes], HomeCopy], hot: Mapping[tuple[str, bytes], HotBlock]
    ) -> None:
        """`secondary` are blocks with a home copy, by tenant and key; `hot` are hot blocks, and those with hot copies."""
        self._rows, self._tenants, self._members = parts.rows, parts.tenants, parts.members
        self._secondary, self._hot = secondary, hot

    def may_evict(self, node_id: int, epoch: int, tenant: str, keys: Sequence[bytes]) -> bytes:
        """Return a flag a key, 1 if other nodes, live and staying, hold and keep it. Raises StaleEpoch."""
        self._members.check(node_id, epoch)
        owner = self._tenants.lookup(tenant)
        stay = {node.node_id for node in self._members.live() if node.takes_blocks and node.state == ALIVE}
        flags = bytearray()
        for key in keys:
            row = owner.rows.get(key, NO_ROW)
            holders = [holder for holder, state in self._rows.pairs(row) if holder in stay and not state & HINT]
            hot = self._hot.get((tenant, key)) if self._hot else None
            kept = max(owner.targets.get(key, 1), 1 + hot.count if hot is not None else 0)
            home = self._secondary.get((tenant, key)) if self._secondary else None
            if home is not None and len(holders) > kept and {home.node_id, home.source_node_id} <= set(holders):
                holders.remove(home.source_node_id)
            first = self._rows.generations[row] % len(holders) if holders else 0
            in_turn = holders[first:] + holders[:first]
            if hot is not None:
                in_turn.sort(key=hot.made_at.__contains__)
            keepers = in_turn[:kept]
            flags.append(len(keepers) == kept and node_id not in keepers)
        return bytes(flags)
