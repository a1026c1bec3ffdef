"""Blocks of fake engines in the real store. A block's bytes derive from its key, so that readers can check them.

All calls run in the engine's event loop and do not block.
"""

from collections.abc import Sequence
from typing import Final

from kvstore.client.aio import AsyncClient
from kvstore.client.block_bytes import BlockArena
from kvstore.client.config import ClientSettings
from kvstore.client.connections.routes import KnownNodes, ShmDiagnostics
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Corrupt
from kvstore.protocol.master_messages import NodeTable
from kvstore.rpc.address import is_local_socket

BATCH_BLOCKS: Final = 256
"""Most blocks in one read or put: bounds the memory."""


class PinnedNodeClient(AsyncClient):
    """Client that puts all blocks to one named node, which may be on another host: the node that the engine reports to the scheduler.

    Without a name, or while the master does not know the node, the master chooses the nodes.
    """

    def __init__(self, master: str, node: str, *, tenant: str, token: str, settings: ClientSettings | None = None) -> None:
        super().__init__(master, tenant=tenant, token=token, settings=settings)
        daemons = self._operations.resources.daemons
        daemons.nodes = _PinnedNode(node, daemons.shm_diagnostics)


class _PinnedNode(KnownNodes):
    def __init__(self, name: str, unshared: ShmDiagnostics) -> None:
        super().__init__(is_local_socket, 0, unshared)
        self._name = name

    def replace(self, table: NodeTable) -> None:
        super().replace(table)
        self.local_id = dict(zip(table.names, table.ids, strict=True)).get(self._name, 0)
        self.is_known = self.local_id != 0  # if False the next put requests the table again


class BlockStore:
    """Reads and writes the blocks of one namespace."""

    def __init__(self, client: AsyncClient, namespace: Namespace, block_bytes: int) -> None:
        self._client = client
        self._namespace = namespace
        self._arena = BlockArena(BATCH_BLOCKS, block_bytes)

    async def load(self, keys: Sequence[bytes]) -> int:
        """Read blocks until one is missing, and return their number. Raises Corrupt for wrong bytes."""
        for start in range(0, len(keys), BATCH_BLOCKS):
            part = keys[start : start + BATCH_BLOCKS]
            values = await self._client.get_batch(part)
            self._arena.make(_ids(part))
            for index, value in enumerate(values):
                if value is None:
                    return start + index
                if value != self._arena.views[index]:
                    raise Corrupt(f"block {part[index].hex()} has other bytes than were put")
        return len(keys)

    async def store(self, keys: Sequence[bytes], first: int) -> None:
        """Put the blocks from index `first` on."""
        parents: list[bytes | None] = [None, *keys]
        for start in range(first, len(keys), BATCH_BLOCKS):
            part = keys[start : start + BATCH_BLOCKS]
            arena = BlockArena(len(part), self._arena.block_bytes)  # not self._arena: concurrent calls would overwrite it
            arena.make(_ids(part))
            above = parents[start : start + len(part)]
            # ack="cluster": the scheduler's next decision reads the directory.
            await self._client.put_batch(part, arena.views, namespace=self._namespace, parents=above, ack="cluster")


def _ids(keys: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(key[:8], "little") for key in keys]
