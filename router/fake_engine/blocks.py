"""The blocks of stand-in engines: real bytes in the real store, made from a block's key, so that whoever reads one knows what must come.

Blocking client calls are not used: all of it runs in the engine's event loop.
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
"""Blocks that are read or made at once: a limit on memory."""


class PinnedNodeClient(AsyncClient):
    """A client that writes to the node of one name, on whichever host that is: the one that the engine reports to the scheduler.

    While the master does not know that node, or no name is given, blocks go where there is room.
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
        self.is_known = self.local_id != 0  # else asked for again at the next put


class BlockStore:
    """Reads and writes the blocks of one namespace."""

    def __init__(self, client: AsyncClient, namespace: Namespace, block_bytes: int) -> None:
        self._client = client
        self._namespace = namespace
        self._arena = BlockArena(BATCH_BLOCKS, block_bytes)

    async def load(self, keys: Sequence[bytes]) -> int:
        """Read blocks until one is missing: how many were there. Raises Corrupt for one with wrong bytes."""
        for start in range(0, len(keys), BATCH_BLOCKS):
            part = keys[start : start + BATCH_BLOCKS]
            values = await self._client.get_batch(part)
            self._arena.make(_ids(part))
            for index, value in enumerate(values):
                if value is None:
                    return start + index
                if value != self._arena.views[index]:
                    raise Corrupt(f"block {part[index].hex()} is not what was put")
        return len(keys)

    async def store(self, keys: Sequence[bytes], first: int) -> None:
        """Write the blocks from the index `first` on; those that are there already cost nothing."""
        parents: list[bytes | None] = [None, *keys]
        for start in range(first, len(keys), BATCH_BLOCKS):
            part = keys[start : start + BATCH_BLOCKS]
            arena = BlockArena(len(part), self._arena.block_bytes)  # the client reads it while others make theirs
            arena.make(_ids(part))
            above = parents[start : start + len(part)]
            # The router's next decision looks in the directory.
            await self._client.put_batch(part, arena.views, namespace=self._namespace, parents=above, ack="cluster")


def _ids(keys: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(key[:8], "little") for key in keys]
