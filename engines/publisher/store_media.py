"""Media in which a store has the blocks of a prompt: memory of a node counts as `cpu`, NVMe as `disk`."""

import logging
from collections.abc import Sequence
from typing import Final

from kvstore.client.sync import Client
from kvstore.engines.kv_events.events import CPU, DISK
from kvstore.engines.publisher.prefix_table import Context
from kvstore.kvcache.naming import Naming
from kvstore.protocol.errors import KVStoreError

DEADLINE_S: Final = 1.0
"""For one question; Mooncake's clients wait as long for an answer to theirs."""
NVME: Final = "nvme"

log = logging.getLogger("kvstore.publisher")


class StoreMedia:
    """Threads may share it. The client is closed by its owner."""

    def __init__(self, client: Client, naming: Naming, *, model: str) -> None:
        """`model`: the name by which routers ask for the model of `naming`."""
        self._client = client
        self._model = model
        self.naming = naming
        self._is_silent = False

    def has(self, context: Context) -> bool:
        """Whether the store's blocks are of this context: of its model and block size, without an adapter or a salt."""
        return (context.model, context.block_tokens, context.adapter, context.salt) == (self._model, self.naming.block_tokens, "", "")

    def media(self, keys: Sequence[bytes]) -> list[str]:
        """`cpu` or `disk` for each block that can be read, "" for the others; [] where the store does not answer in time."""
        try:
            found = self._client.locate(keys, deadline_s=DEADLINE_S) if keys else []
        except KVStoreError as error:
            if not self._is_silent:
                log.warning("routers are told of no block of the store: %s", error)
            self._is_silent = True
            return []
        self._is_silent = False
        return [_medium({tier for replica in replicas for tier in replica.tiers}) for replicas in found]


def _medium(tiers: set[str]) -> str:
    if tiers - {NVME}:
        return CPU
    return DISK if tiers else ""
