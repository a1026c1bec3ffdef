"""kvstore's connector with a fault: blocks vanish between the moment the engine is told of them and the moment it loads them."""

from typing import Any

from kvstore.client import Client
from kvstore.engines.vllm.connector import KVStoreConnector

VANISHING: list[tuple[int, int]] = []
"""Groups of layers, and places of their blocks in the next load: the first is 0."""


class LosingConnector(KVStoreConnector):
    """Removes the blocks of VANISHING from the store, then loads."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._step().loads
        if loads and VANISHING:
            with Client(self._settings.master) as client:
                for load in loads:
                    group = self._rank_groups[load.group]
                    assert group is not None
                    keys = group.shard.keys(load.hashes)
                    client.remove([keys[place] for of_group, place in VANISHING if of_group == load.group], force=True)
            VANISHING.clear()
        super().start_load_kv(forward_context, **kwargs)
