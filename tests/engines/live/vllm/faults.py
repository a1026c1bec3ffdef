"""kvstore's connector with a fault between the lookup of blocks and their load: blocks vanish, come late, or others fill the store."""

import threading
from typing import Any, Final

from kvstore.client import Client
from kvstore.engines.vllm.connector import KVStoreConnector

FILL_VALUES: Final = 512
"""Of FILL_BYTES each."""
FILL_BYTES: Final = 128 << 10
VANISHING: list[tuple[int, int]] = []
"""Groups of layers, and places of their blocks in the next load: the first is 0."""
LATE_S: Final = 1.0


class LosingConnector(KVStoreConnector):
    """Removes the blocks of VANISHING from the store, then loads."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._step().loads
        if loads and VANISHING:
            with Client(self._settings.master) as client:
                for load in loads:
                    group = self._rank_groups[load.group]
                    assert group is not None
                    keys = group.shard.of(load.variant).keys(load.hashes)
                    client.remove([keys[place] for of_group, place in VANISHING if of_group == load.group], force=True)
            VANISHING.clear()
        super().start_load_kv(forward_context, **kwargs)


class LateConnector(KVStoreConnector):
    """Connector whose loads begin LATE_S late, so that a test can act in between."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        fetch = self._worker._fetch

        def late(*arguments: Any) -> int:
            threading.Event().wait(LATE_S)
            return fetch(*arguments)

        self._worker._fetch = late  # type: ignore[method-assign,assignment]


class FillingConnector(KVStoreConnector):
    """Puts FILL_VALUES others into the store, then loads."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._step().loads:
            with Client(self._settings.master) as client:
                for start in range(0, FILL_VALUES, 16):
                    client.put_batch([f"fill-{start + number}".encode() for number in range(16)], [bytes(FILL_BYTES)] * 16, deadline_s=60)
                client.flush(deadline_s=60)
        super().start_load_kv(forward_context, **kwargs)
