"""kvstore's connector with a fault: blocks vanish between the moment the engine is told of them and the moment it loads them."""

from typing import Any

from kvstore.client import Client
from kvstore.engines.vllm.connector import KVStoreConnector

VANISHING: list[int] = []
"""Places of blocks in the next load, the first is 0."""


class LosingConnector(KVStoreConnector):
    """Removes the blocks of VANISHING from the store, then loads."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._step().loads
        if loads and VANISHING and self._shard is not None:
            with Client(self._settings.master) as client:
                keys = self._shard.keys(loads[0].hashes)
                client.remove([keys[place] for place in VANISHING], force=True)
            VANISHING.clear()
        super().start_load_kv(forward_context, **kwargs)
