"""Orders of the master to its nodes, gathered by node and tenant so that each is one message."""

from kvstore.master.directory.tenants import Tenant
from kvstore.protocol.catalog_messages import Drop, Hold


class Commands:
    """What to tell which node. Every message carries the master's epoch: a node refuses those of a former master."""

    def __init__(self, master_epoch: int) -> None:
        self._master_epoch = master_epoch
        self._drops: dict[tuple[int, str, bool], tuple[list[bytes], list[int]]] = {}
        self._holds: dict[tuple[int, str, int], list[bytes]] = {}

    def drop(self, node_id: int, tenant: Tenant, key: bytes, generation: int, *, force: bool = False) -> None:
        """`node_id` shall delete the block of this generation or an older one; with `force` also while it is pinned or read."""
        keys, generations = self._drops.setdefault((node_id, tenant.name, force), ([], []))
        keys.append(key)
        generations.append(generation)

    def hold(self, node_id: int, tenant: Tenant, key: bytes, *, pinned: bool) -> None:
        """`node_id` shall keep the block from eviction, or no longer."""
        self._holds.setdefault((node_id, tenant.name, int(pinned)), []).append(key)

    def messages(self) -> list[tuple[int, Drop | Hold]]:
        """(node id, message) of all that was gathered."""
        if not self._drops and not self._holds:  # as a rule
            return []
        drops = [
            (node_id, Drop(self._master_epoch, tenant, keys, generations, force=int(force)))
            for (node_id, tenant, force), (keys, generations) in self._drops.items()
        ]
        holds = [(node_id, Hold(self._master_epoch, tenant, keys, pinned)) for (node_id, tenant, pinned), keys in self._holds.items()]
        return [*drops, *holds]
