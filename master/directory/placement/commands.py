"""Commands of the master to its nodes, batched into messages by node and tenant."""

from collections.abc import Iterable

from kvstore.master.directory.index.tenants import Tenant
from kvstore.protocol.catalog_messages import DeleteBlocks, SetPinned
from kvstore.protocol.frames import MAX_BATCH


class NodeCommands:
    """Commands collected for nodes. Each message has the master's epoch: a node refuses those of a former master."""

    def __init__(self, master_epoch: int) -> None:
        self._master_epoch = master_epoch
        self._drops: dict[tuple[int, str, bool], tuple[list[bytes], list[int]]] = {}
        self._holds: dict[tuple[int, str, int], list[bytes]] = {}

    def drop(self, node_id: int, tenant: Tenant, key: bytes, generation: int, *, force: bool = False) -> None:
        """`node_id` shall delete the block of this generation or an older one; with `force` even if it is pinned or
        being read."""
        keys, generations = self._drops.setdefault((node_id, tenant.name, force), ([], []))
        keys.append(key)
        generations.append(generation)

    def set_pinned(self, node_id: int, tenant: Tenant, key: bytes, *, pinned: bool) -> None:
        """`node_id` shall pin the block, or unpin it."""
        self.set_pinned_all(node_id, tenant, (key,), pinned=pinned)

    def set_pinned_all(self, node_id: int, tenant: Tenant, keys: Iterable[bytes], *, pinned: bool) -> None:
        """As `set_pinned`, for each key."""
        self._holds.setdefault((node_id, tenant.name, int(pinned)), []).extend(keys)

    def messages(self) -> list[tuple[int, DeleteBlocks | SetPinned]]:
        """Return (node id, message) of all collected commands."""
        if not self._drops and not self._holds:  # usual
            return []
        drops = [
            (node_id, DeleteBlocks(self._master_epoch, tenant, keys[part], generations[part], force=int(force)))
            for (node_id, tenant, force), (keys, generations) in self._drops.items()
            for part in _parts(keys)
        ]
        holds = [
            (node_id, SetPinned(self._master_epoch, tenant, keys[part], pinned))
            for (node_id, tenant, pinned), keys in self._holds.items()
            for part in _parts(keys)
        ]
        return [*drops, *holds]


def _parts(keys: list[bytes]) -> list[slice]:
    """Slices of at most one message each."""
    return [slice(begin, begin + MAX_BATCH) for begin in range(0, len(keys), MAX_BATCH)]
